#pragma once

/// Changes a number that other blocks change too, until change(number) says no.
template <class Change> void change_alone(float* place, Change change) {
  float now, next;
  __atomic_load(place, &now, __ATOMIC_SEQ_CST);
  while (change(now, next) &&
         !__atomic_compare_exchange(place, &now, &next, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
    ;
}
inline void reduce_add(float* sum, float x) {
  change_alone(sum, [x](float now, float& next) { return next = now + x, true; });
}
inline void reduce_add_4(float* sums, const float (&x)[4]) {
  for (int i = 0; i < 4; ++i)
    reduce_add(sums + i, x[i]);
}
inline void raise_maximum(float* maximum, float x) {
  // A NaN stays, and comes in the place of every number.
  change_alone(maximum,
               [x](float now, float& next) { return next = x + 0.0f, now == now && !(x <= now); });
}
