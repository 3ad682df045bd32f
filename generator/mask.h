//===- mask.h - The expression of a spec's mask -----------------------------===//
#pragma once

#include "generator/expression.h"
#include "generator/spec.h"

namespace sagebwd {

/// The expression of a spec that has a mask. It stays for good. Raises SpecError for a text that is
/// no mask.
const Expression& mask_of(const AttentionSpec&);
/// How many tables the spec's mask reads; 0 without a mask.
int tables_of(const AttentionSpec&);
/// Whether the mask is another one for some sequences, or for some query heads.
bool mask_depends_on_batch(const AttentionSpec&);
bool mask_depends_on_head(const AttentionSpec&);

/// The text of the file that templates include as mask_expression.cuh, with the function sees().
std::string mask_source(const AttentionSpec&);

} // namespace sagebwd
