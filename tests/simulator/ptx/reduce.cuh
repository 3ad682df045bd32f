#pragma once

#include <atomic>

inline void reduce_add(float* sum, float x) { std::atomic_ref(*sum) += x; }
inline void reduce_add_4(float* sums, const float (&x)[4]) {
  for (int i = 0; i < 4; ++i)
    reduce_add(sums + i, x[i]);
}
