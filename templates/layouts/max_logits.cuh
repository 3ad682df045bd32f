//===- layouts/max_logits.cuh - What tile/math/max_logits.cuh keeps in shared memory -----===//
#pragma once

/// For each of a block's queries what its scores lack, and for each of the warps that own them the
/// largest score that it knows.
constexpr int max_logits_bytes(int block_q) { return block_q * 4 + block_q / 16 * 4; }
