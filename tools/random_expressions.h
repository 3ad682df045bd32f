//===- random_expressions.h - Masks and score functions of a verification -===//
#pragma once

#include "runtime/reference/reference.h"
#include "tools/random_numbers.h"

namespace sagebwd::tools {

/// The spec with a mask or a score function from a list of what models have.
AttentionSpec with_expression(Random&, AttentionSpec);

/// Fills the inputs' tables with numbers that depend on the seed alone, and what mask and score
/// function of the spec make of them. Nothing for a spec that has neither.
void add_random_expressions(const AttentionSpec&, uint64_t seed, reference::Inputs&);

} // namespace sagebwd::tools
