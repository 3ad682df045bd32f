//===- ptx_loops.h - Counting matrix products in the loops of PTX -----------===//
#pragma once

#include <ostream>
#include <string>

namespace sagebwd::test {

/// Matrix instructions by the type of their operands. One multiplies 16 x 8 (mma.sync) or 64 x 64
/// (wgmma; one of 128 columns counts twice) results by 32 bytes of the summed dimension.
struct Products {
  int s8 = 0;      ///< signed x signed
  int u8 = 0;      ///< unsigned x signed
  int float16 = 0; ///< of the wanted 16-bit type
  int other = 0;   ///< any other shape, type or family

  bool operator==(const Products&) const = default;
  Products operator+(const Products& o) const {
    return {s8 + o.s8, u8 + o.u8, float16 + o.float16, other + o.other};
  }
  Products operator*(int n) const { return {s8 * n, u8 * n, float16 * n, other * n}; }
};
std::ostream& operator<<(std::ostream&, const Products&);

struct LoopProducts {
  int loops = 0;         ///< outermost loops that hold products
  Products per_pass;     ///< of such a loop: the same in all and on every path through one
  Products outside;      ///< in no loop
  std::string objection; ///< why the numbers above do not hold, or empty
};
/// `element` is "bf16" or "f16". A nested loop counts as often as its counter runs; one whose end
/// is no number is more passes of the loop around it, and counts once.
LoopProducts count_products(const std::string& ptx, bool wgmma, const std::string& element);

} // namespace sagebwd::test
