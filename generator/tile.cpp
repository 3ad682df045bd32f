//===- tile.cpp - The tile of an attention kernel --------------------------===//

#include "generator/tile.h"

namespace sagebwd {

std::string to_string(const TileConfig& tile) { return line_of(tile); }

TileConfig parse_tile(std::string_view text) {
  TileConfig tile;
  if (!parse_line(text, tile))
    throw SpecError("cannot read tile '" + std::string(text) + "': expected the family (" +
                    known_words<Family>(" or ") +
                    "), block_q x block_kv, warps, stages and blocks per SM, as in "
                    "'mma 64x128 w4 s1 b2'");
  return tile;
}

} // namespace sagebwd
