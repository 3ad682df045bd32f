//===- operands_test.cpp - What kernels can be given, and how it is packed --===//

#include "generator/definition.h"
#include "tests/generator/specs.h"

#include <cstring>
#include <set>

using namespace sagebwd;
using O = Operand;

namespace {

size_t index(O operand) { return static_cast<size_t>(operand); }

TEST(Operands, HaveTheTypesThatPackParamsKnows) {
  for (size_t i = 0; i < index(O::count); ++i) {
    const std::string type(type_of(static_cast<O>(i)));
    EXPECT_TRUE(type.back() == '*' || type == "s64" || type == "int" || type == "float" ||
                type == "TensorMap")
        << type;
  }
}

TEST(Operands, EveryKernelsFieldsHaveDifferentNames) {
  for (const auto& [kind, name] : Words<KernelKind>::all) {
    std::set<std::string_view> names;
    for (O field : definition_of(kind).fields)
      EXPECT_TRUE(names.insert(name_of(field)).second) << name_of(field);
    EXPECT_FALSE(names.empty());
  }
}

TEST(PackParams, LaysOutAsACompilerDoes) {
  struct KeyMean {
    uint64_t k;
    int64_t k_stride_b, k_stride_h, k_stride_s;
    uint64_t v;
    int64_t v_stride_b, v_stride_h, v_stride_s;
    uint64_t k_partial, key_range;
    int channels, value_channels;
    int heads, heads_kv, seq_q, seq_kv, padded_q, padded_kv, causal_offset;
    int window_offset;
    float softmax_scale;
    int sequences, apart, diagonal_at_ends;
    uint64_t first_queries, first_keys, lengths_q, lengths_kv;
  };
  OperandValues values{};
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = 0x0101010100000000u + i; // 32-bit fields keep the low half
  const float scale = 0.125f;
  values[index(O::softmax_scale)] = 0;
  std::memcpy(&values[index(O::softmax_scale)], &scale, 4);
  std::byte params[512] = {};

  ASSERT_EQ(pack_params(definition_of(KernelKind::key_mean).fields, values, params),
            sizeof(KeyMean));
  KeyMean mean;
  std::memcpy(&mean, params, sizeof mean);
  EXPECT_EQ(mean.k, values[index(O::k)]);
  EXPECT_EQ(uint64_t(mean.k_stride_s), values[index(O::k_stride_s)]);
  EXPECT_EQ(uint64_t(mean.v_stride_b), values[index(O::v_stride_b)]);
  EXPECT_EQ(mean.k_partial, values[index(O::k_partial)]);
  EXPECT_EQ(mean.key_range, values[index(O::key_range)]);
  EXPECT_EQ(size_t(mean.heads_kv), index(O::heads_kv));
  EXPECT_EQ(size_t(mean.seq_kv), index(O::seq_kv));
  EXPECT_EQ(size_t(mean.padded_q), index(O::padded_q));
  EXPECT_EQ(mean.softmax_scale, scale);
}

TEST(PackParams, AlignsAFieldBehindASmallerOne) {
  struct Mixed {
    int heads;
    uint64_t q;
    float softmax_scale;
  };
  const ParamFields fields = {O::heads, O::q, O::softmax_scale};
  OperandValues values{};
  values[index(O::q)] = 0x1122334455667788u;
  std::byte params[512] = {};
  ASSERT_EQ(pack_params(fields, values, params), sizeof(Mixed));
  Mixed mixed;
  std::memcpy(&mixed, params, sizeof mixed);
  EXPECT_EQ(mixed.q, 0x1122334455667788u);
}

TEST(PackParams, EveryKernelFitsWhatALaunchTakes) {
  for (const auto& [kind, name] : Words<KernelKind>::all) {
    std::byte params[kMaxParamsBytes];
    EXPECT_LE(pack_params(definition_of(kind).fields, {}, params), kMaxParamsBytes);
  }
}

TEST(Operands, ATensorMapIs128BytesOn64) {
  const Extent map = extent_of("TensorMap");
  EXPECT_EQ(map.bytes, 128u);
  EXPECT_EQ(map.alignment, 64u);
}

TEST(Operands, TensorsOfTheCallerComeFirst) {
  size_t next = 0;
  for (const CallerTensor& tensor : caller_tensors()) {
    EXPECT_EQ(index(tensor.operand), next++);
    EXPECT_EQ(tensor.strided(), type_of(tensor.operand).find("Element") != std::string_view::npos);
  }
  EXPECT_EQ(next, index(O::k_partial)); // the workspace's first
  const CallerTensor& dk = caller_tensors()[index(O::dk)];
  EXPECT_TRUE(dk.tokens == Tokens::keys && !dk.in_forward && !dk.optional && dk.written);
  const CallerTensor& dlse = caller_tensors()[index(O::dlse)];
  EXPECT_TRUE(dlse.tokens == Tokens::queries && !dlse.in_forward && dlse.optional && !dlse.written);
}

TEST(Operands, TensorsOfTheCallerBringTheirStridesAndEveryKernelHasTheSizes) {
  for (O tensor : {O::q, O::k, O::v, O::out, O::dout, O::dq, O::dk, O::dv})
    EXPECT_EQ(name_of(strides_of(tensor)), std::string(name_of(tensor)) + "_stride_b");
  for (O other : {O::lse, O::q8, O::heads, O::q_stride_b})
    EXPECT_EQ(strides_of(other), O::count) << name_of(other);
  std::vector<std::string_view> names;
  for (O field : fields_named({O::dq, O::lse}))
    names.push_back(name_of(field));
  EXPECT_EQ(names, (std::vector<std::string_view>{
                       "dq",         "dq_stride_b",   "dq_stride_h",      "dq_stride_s",
                       "lse",        "channels",      "value_channels",   "heads",
                       "heads_kv",   "seq_q",         "seq_kv",           "padded_q",
                       "padded_kv",  "causal_offset", "window_offset",    "softmax_scale",
                       "sequences",  "apart",         "diagonal_at_ends", "first_queries",
                       "first_keys", "lengths_q",     "lengths_kv"}));
}

} // namespace
