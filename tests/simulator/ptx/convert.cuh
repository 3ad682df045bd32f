#pragma once
#include "formats.h"

template <typename T> float2 unpack(u32 pair);
template <> inline float2 unpack<bf16>(u32 pair) {
  return {simulator::float_of_bf16(pair & 0xffff), simulator::float_of_bf16(pair >> 16)};
}
template <> inline float2 unpack<fp16>(u32 pair) {
  return {simulator::float_of_fp16(pair & 0xffff), simulator::float_of_fp16(pair >> 16)};
}

template <typename T> u32 pack(float low, float high);
template <> inline u32 pack<bf16>(float low, float high) {
  return simulator::bf16_of_float(low) | simulator::bf16_of_float(high) << 16;
}
template <> inline u32 pack<fp16>(float low, float high) {
  return simulator::fp16_of_float(low) | simulator::fp16_of_float(high) << 16;
}

template <typename T> u32 max_magnitudes(u32 a, u32 b) {
  const float2 x = unpack<T>(a), y = unpack<T>(b & 0x7fff7fffu);
  const auto larger = [](float x, float y) { return x != x || x > y ? x : y; };
  return pack<T>(larger(x.x, y.x), larger(x.y, y.y));
}

namespace simulator {
/// cvt.rni.s32.f32, then cvt.pack.sat; NaN becomes 0.
inline u32 byte_of(float x, int low, int high) {
  const float rounded = x != x ? 0 : __builtin_nearbyintf(x);
  return static_cast<u32>(rounded < low ? low : rounded > high ? high : static_cast<int>(rounded));
}
inline u32 word_of(u32 a, u32 b, u32 c, u32 d) {
  return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | d << 24;
}
} // namespace simulator

inline u32 pack_s8(float a, float b, float c, float d) {
  const auto byte = [](float x) { return simulator::byte_of(x, -128, 127); };
  return simulator::word_of(byte(a), byte(b), byte(c), byte(d));
}
inline u32 pack_u8(float a, float b, float c, float d) {
  const auto byte = [](float x) { return simulator::byte_of(x, 0, 255); };
  return simulator::word_of(byte(a), byte(b), byte(c), byte(d));
}
