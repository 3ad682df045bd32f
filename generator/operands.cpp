//===- operands.cpp - The parameters of kernels ----------------------------===//

#include "generator/operands.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace sagebwd {
namespace {

constexpr std::string_view kNames[] = {
#define X(name, ...) #name,
    SAGEBWD_OPERANDS(X)
#undef X
#define X(name, ...) #name "_stride_b", #name "_stride_h", #name "_stride_s",
        SAGEBWD_STRIDED_TENSORS(X)
#undef X
};
constexpr std::string_view kTypes[] = {
#define X(name, type, ...) type,
    SAGEBWD_OPERANDS(X)
#undef X
};

constexpr size_t kCount = static_cast<size_t>(Operand::count);

} // namespace

std::string_view name_of(Operand operand) { return kNames[static_cast<size_t>(operand)]; }
std::string_view type_of(Operand operand) {
  const auto index = static_cast<size_t>(operand);
  return index < std::size(kTypes) ? kTypes[index] : "s64"; // a stride
}

Extent extent_of(std::string_view type) {
  if (type == "int" || type == "float")
    return {4, 4};
  if (type == "TensorMap")
    return {128, 64};
  return {8, 8};
}

Operand strides_of(Operand tensor) {
  static const auto table = [] {
    std::array<Operand, kCount> strides;
    for (size_t i = 0; i < kCount; ++i) {
      const auto* found =
          std::find(std::begin(kNames), std::end(kNames), std::string(kNames[i]) + "_stride_b");
      strides[i] = static_cast<Operand>(found - std::begin(kNames));
    }
    return strides;
  }();
  return table[static_cast<size_t>(tensor)];
}

const std::vector<CallerTensor>& caller_tensors() {
  enum Passes { forward, backward, both };
  enum Need { required, optional, mixed };
  static const auto tensors = [] {
    std::vector<CallerTensor> found;
    auto of = CallerTensor::elements;
#define X(name, type, tokens, passes, need)                                                        \
  found.push_back({Operand::name, Tokens::tokens, (passes) != backward, (passes) != forward,       \
                   (need) == optional, (need) == mixed,                                            \
                   !std::string_view(type).starts_with("const"), of});
    SAGEBWD_STRIDED_TENSORS(X)
    of = CallerTensor::rows;
    SAGEBWD_ROW_TENSORS(X)
    of = CallerTensor::means;
    SAGEBWD_MEAN_TENSORS(X)
    of = CallerTensor::packing;
    SAGEBWD_PACKING_TENSORS(X)
    of = CallerTensor::lists;
    SAGEBWD_LIST_TENSORS(X)
    of = CallerTensor::intervals;
    SAGEBWD_INTERVAL_TENSORS(X)
    of = CallerTensor::tables;
    SAGEBWD_TABLE_TENSORS(X)
    of = CallerTensor::shares;
    SAGEBWD_SHARE_TENSORS(X)
    of = CallerTensor::kept;
    SAGEBWD_KEPT_TENSORS(X)
    of = CallerTensor::heads;
    SAGEBWD_HEAD_TENSORS(X)
#undef X
    return found;
  }();
  return tensors;
}

Operand tensor_of(Operand map) {
#define X(name, tensor)                                                                            \
  if (map == Operand::name)                                                                        \
    return Operand::tensor;
  SAGEBWD_TENSOR_MAPS(X)
#undef X
  return Operand::count;
}

ParamFields fields_named(std::initializer_list<Operand> operands) {
  ParamFields fields;
  for (Operand operand : operands) {
    fields.push_back(operand);
    if (const Operand stride = strides_of(operand); stride != Operand::count)
      for (int i = 0; i < 3; ++i)
        fields.push_back(static_cast<Operand>(static_cast<int>(stride) + i));
  }
#define X(name, ...) fields.push_back(Operand::name);
  SAGEBWD_SIZES(X)
  SAGEBWD_PACKING_TENSORS(X)
#undef X
  return fields;
}

ParamFields table_operands() {
  ParamFields fields;
  for (int i = 0; i < kMostTables; ++i)
    for (Operand operand : {table_operand(i), rows_operand(i), columns_operand(i)})
      fields.push_back(operand);
  return fields;
}

void set(OperandValues& values, Operand operand, float value) {
  set(values, operand, uint64_t{std::bit_cast<uint32_t>(value)});
}

void set_tensor(OperandValues& values, Operand tensor, uint64_t address,
                const int64_t (&strides)[3]) {
  set(values, tensor, address);
  for (int i = 0; i < 3; ++i)
    set(values, static_cast<Operand>(static_cast<int>(strides_of(tensor)) + i),
        static_cast<uint64_t>(strides[i]));
}

std::string params_struct(const ParamFields& fields) {
  std::string text = "struct Params {\n";
  for (Operand field : fields)
    text += "  " + std::string(type_of(field)) + " " + std::string(name_of(field)) + ";\n";
  return text + "};\n";
}

size_t pack_params(const ParamFields& fields, const OperandValues& values, std::byte* params) {
  size_t end = 0, alignment = 8;
  for (Operand field : fields) {
    const Extent extent = extent_of(type_of(field));
    const uint64_t& value = values[static_cast<size_t>(field)];
    end = (end + extent.alignment - 1) / extent.alignment * extent.alignment;
    std::memcpy(params + end,
                extent.bytes > sizeof(value) ? reinterpret_cast<const void*>(value) : &value,
                extent.bytes);
    end += extent.bytes;
    alignment = std::max(alignment, extent.alignment);
  }
  return (end + alignment - 1) / alignment * alignment;
}

} // namespace sagebwd
