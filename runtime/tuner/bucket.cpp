//===- bucket.cpp - Problems that share a tuned tile ----------------------===//

#include "runtime/tuner/bucket.h"

#include "generator/definition.h"

#include <algorithm>
#include <bit>

namespace sagebwd {
namespace {

constexpr int64_t kShortest = 512, kLongest = 65536;

uint8_t length_class(int64_t tokens) {
  const int64_t clamped = std::clamp(tokens, kShortest, kLongest);
  return static_cast<uint8_t>(std::bit_width(static_cast<uint64_t>((clamped - 1) / kShortest)));
}

} // namespace

Bucket bucket_of(KernelKind kind, const Problem& p, int sm_count) {
  const bool keys = tiling_of(kind).blocks_own_keys;
  // In floating point, so that lengths which no GPU holds do not overflow.
  const double blocks = static_cast<double>(p.batch) *
                        static_cast<double>(keys ? p.heads_kv : p.heads) *
                        static_cast<double>(((keys ? p.seq_kv : p.seq_q) + 127) / 128);
  return {length_class(p.seq_q), length_class(p.seq_kv), blocks >= 2.0 * sm_count};
}

std::string to_string(const Bucket& bucket) {
  return "q" + std::to_string(kShortest << bucket.seq_q) + " kv" +
         std::to_string(kShortest << bucket.seq_kv) + (bucket.full ? " full" : " partial");
}

} // namespace sagebwd
