#pragma once

namespace simulator {
template <class T> T& in_shared(u32 address) {
  return *reinterpret_cast<T*>(lane().at(address, sizeof(T)));
}
template <class T> T& written(u32 address) {
  T& place = in_shared<T>(address);
  lane().wrote(address, sizeof(T));
  return place;
}
} // namespace simulator

inline float read_float(u32 address) { return simulator::in_shared<float>(address); }
inline float2 read_float2(u32 address) { return simulator::in_shared<float2>(address); }
inline float2 read_float2_again(u32 address) { return read_float2(address); }
inline float4 read_float4(u32 address) { return simulator::in_shared<float4>(address); }
inline u32 read_word(u32 address) { return simulator::in_shared<u32>(address); }
inline void write_float(u32 address, float x) { simulator::written<float>(address) = x; }
inline void write_float2(u32 address, const float (&x)[2]) {
  simulator::written<float2>(address) = {x[0], x[1]};
}
inline void write_float4(u32 address, const float (&x)[4]) {
  simulator::written<float4>(address) = {x[0], x[1], x[2], x[3]};
}
inline void write_words(u32 address, const u32 (&x)[4]) {
  simulator::written<uint4>(address) = {x[0], x[1], x[2], x[3]};
}
inline void read_words(u32 (&x)[4], u32 address) {
  const uint4 words = simulator::in_shared<uint4>(address);
  x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
}
inline void write_word(u32 address, u32 x) { simulator::written<u32>(address) = x; }
inline void raise_float(u32 address, float x) {
  u32& place = simulator::written<u32>(address);
  const u32 bits = __float_as_uint(x);
  place = bits > place ? bits : place;
}
