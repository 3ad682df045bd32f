//===- tile/math/rise.cuh - When the reference of a row moves ---------------------===//
#pragma once

/// A group's maximum is so far above it, in units of log2. FP32 sums of 2^16 times what they were
/// meant for are as exact.
constexpr float RISE = 16.0f;
