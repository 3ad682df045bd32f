//===- rounding.cpp - bf16 and fp16 as float values -----------------------===//
#include "runtime/reference/reference.h"

#include <bit>
#include <cmath>

namespace sagebwd::reference {
namespace {

uint16_t encode_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x))
    // Make the NaN quiet, so that it cannot become an Inf.
    return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t encode_fp16(float x) {
  const uint32_t all = std::bit_cast<uint32_t>(x);
  const uint32_t sign = all >> 16 & 0x8000;
  uint32_t bits = all & 0x7fffffff;
  const float magnitude = std::bit_cast<float>(bits);
  if (std::isnan(x))
    return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 65520.0f) // halfway from the largest finite value to 2^16
    return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x1p-14f) // subnormal: FP32 addition rounds to multiples of 2^-24
    return static_cast<uint16_t>(
        sign | (std::bit_cast<uint32_t>(magnitude + 0.5f) - std::bit_cast<uint32_t>(0.5f)));
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | (bits - (uint32_t(127 - 15) << 23)) >> 13);
}

float decode_fp16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 0)
    return std::copysign(static_cast<float>(mantissa) * 0x1p-24f, std::bit_cast<float>(sign));
  const uint32_t biased = exponent == 31 ? 255 : exponent + 127 - 15;
  return std::bit_cast<float>(sign | biased << 23 | mantissa << 13);
}

} // namespace

uint16_t encode(DType dtype, float x) {
  return dtype == DType::bf16 ? encode_bf16(x) : encode_fp16(x);
}
float decode(DType dtype, uint16_t bits) {
  return dtype == DType::bf16 ? std::bit_cast<float>(uint32_t(bits) << 16) : decode_fp16(bits);
}
float round_to(DType dtype, float x) { return decode(dtype, encode(dtype, x)); }

} // namespace sagebwd::reference
