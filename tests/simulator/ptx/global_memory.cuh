#pragma once

inline void store_words(void* place, const u32 (&x)[4], int line = __builtin_LINE()) {
  if (reinterpret_cast<unsigned long>(place) % 16 != 0)
    simulator::lane().fail("a misaligned store in line", line);
  *static_cast<uint4*>(place) = {x[0], x[1], x[2], x[3]};
}
inline void reload_words(u32 (&x)[4], const void* place) { __builtin_memcpy(x, place, sizeof x); }
