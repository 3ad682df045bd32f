//===- mask.cpp - The expression of a spec's mask ---------------------------===//

#include "generator/mask.h"

#include "generator/operands.h"

#include <mutex>

namespace sagebwd {

static_assert(kMostOperands == kMostTables);

const Expression& mask_of(const AttentionSpec& spec) {
  static std::mutex mutex;
  static std::map<std::string, Expression> parsed; // as many as there are masks in a process
  const std::lock_guard lock(mutex);
  auto found = parsed.find(spec.mask);
  if (found == parsed.end())
    found = parsed.emplace(spec.mask, parse_mask(spec.mask)).first;
  return found->second;
}

int tables_of(const AttentionSpec& spec) {
  return spec.mask.empty() ? 0 : static_cast<int>(mask_of(spec).operands().size());
}

bool mask_depends_on_batch(const AttentionSpec& spec) {
  return !spec.mask.empty() && dependence(mask_of(spec)).b;
}
bool mask_depends_on_head(const AttentionSpec& spec) {
  return !spec.mask.empty() && dependence(mask_of(spec)).h;
}

std::string mask_source(const AttentionSpec& spec) {
  const Expression& mask = mask_of(spec);
  std::string text = "//===- mask_expression.cuh - What a query sees "
                     "-----------------------------------===//\n"
                     "#include \"tile/math/expressions.cuh\"\n\n"
                     "/// " +
                     to_string(mask) +
                     "\n__device__ __forceinline__ bool sees(const Params& p, int b, int h, int q, "
                     "int k) {\n";
  for (int i = 0; i < tables_of(spec); ++i) {
    const ExpressionOperand& operand = mask.operands()[static_cast<size_t>(i)];
    const std::string table = "p.table_" + std::to_string(i);
    const bool two = operand.type.indices == 2;
    text += "  const auto read_" + operand.name + " = [&](" + (two ? "int i, int j" : "int j") +
            ") {\n    return read_table(" + table + ", " + table + "_rows, " + table +
            "_columns, " + (two ? "i" : "0") + ", j);\n  };\n";
  }
  const CudaText cuda = to_cuda(mask);
  for (size_t from = 0, to; from < cuda.statements.size(); from = to + 1) {
    to = cuda.statements.find('\n', from);
    text += "  " + cuda.statements.substr(from, to - from) + "\n";
  }
  return text + "  return " + cuda.result + ";\n}\n";
}

} // namespace sagebwd
