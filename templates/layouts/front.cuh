//===- layouts/front.cuh - Which tokens a block of the front end has -------===//
//
// Plain C++: the generator compiles it too, for the number of blocks.
//
//===----------------------------------------------------------------------===//
#pragma once

/// The tokens of a head that a block takes, of heads of `width` channels. Gradients of gains are
/// summed over so many tokens first.
constexpr int front_tokens(int width) { return 8192 / width; }
/// The channels of a gain that a block of front_gains sums.
constexpr int FRONT_GAIN_CHANNELS = 8;
