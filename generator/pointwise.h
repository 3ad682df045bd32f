//===- pointwise.h - The expressions of a spec: mask and score function -----===//
#pragma once

#include "generator/expression.h"
#include "generator/spec.h"

namespace sagebwd {

/// The expression of a spec that has a mask, or a score function. It stays for good. Raises
/// SpecError for a text that is none.
const Expression& mask_of(const AttentionSpec&);
const Expression& score_of(const AttentionSpec&);

/// A tensor that an expression of the spec reads: those of the mask, then those of the score.
struct TableOfSpec {
  std::string name;
  int indices;
  bool of_score; ///< floats, which the mask has none of
};
std::vector<TableOfSpec> tables_of(const AttentionSpec&);

/// Whether the mask is another one for some sequences, or for some query heads.
bool mask_depends_on_batch(const AttentionSpec&);
bool mask_depends_on_head(const AttentionSpec&);
/// Whether the score function is another one for some sequences, or for some query heads.
bool score_depends_on_batch(const AttentionSpec&);
bool score_depends_on_head(const AttentionSpec&);
/// Whether the spec has a score function whose value depends on more than s - g, for some g:
/// kernels then need s as it is, and its derivative.
bool bends_scores(const AttentionSpec&);

/// Whether the score function reads tables, and whether at places that differ from score to score.
bool score_reads(const AttentionSpec&);
bool score_reads_positions(const AttentionSpec&);

/// Whether the score function takes a tanh, exp, log, sqrt, sigmoid or pow of every score.
bool score_calls_functions(const AttentionSpec&);

/// The texts of the files that templates include as mask_expression.cuh, with the struct Sight, as
/// mask_ranges.cuh, with the struct SightOfBlocks, and as score_expression.cuh, with the struct
/// Score. That of the forward keeps scores from being infinitely far below zero.
std::string mask_source(const AttentionSpec&);
std::string mask_ranges_source(const AttentionSpec&);
std::string score_source(const AttentionSpec&, bool of_forward);

} // namespace sagebwd
