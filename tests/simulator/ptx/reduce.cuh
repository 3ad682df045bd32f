#pragma once

#include <atomic>

inline void reduce_add(float* sum, float x) { std::atomic_ref(*sum) += x; }
inline void reduce_add_4(float* sums, const float (&x)[4]) {
  for (int i = 0; i < 4; ++i)
    reduce_add(sums + i, x[i]);
}
inline void raise_maximum(float* maximum, float x) {
  const std::atomic_ref place(*maximum);
  // A NaN stays, and comes in the place of every number.
  for (float now = place.load(); now == now && !(x <= now);)
    if (place.compare_exchange_weak(now, x + 0.0f))
      return;
}
