//===- tile/memory/block_shape.cuh - What this kernel's LAYOUT is formed from ----===//
#pragma once

#include "configuration.cuh"
#include "layouts/block_shape.cuh"

constexpr BlockShape SHAPE = {HEAD_DIM, SUM_CHANNELS,      BLOCK_Q,  BLOCK_KV, STAGES,
                              GROUP_KV, CHANNEL_TOKENS_KV, QK16,     DV16,     DQ16,
                              DK16,     BLOCK_SCALES,      HAS_LISTS};
