#pragma once

template <int N> void add_if(float (&sums)[N], const float (&x)[N], unsigned wanted) {
  for (int i = 0; i < N; ++i)
    if (wanted)
      sums[i] += x[i];
}
