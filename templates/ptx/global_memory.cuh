//===- ptx/global_memory.cuh - Loads and stores of global memory -------------===//
#pragma once

#include "base.cuh"

/// 16 bytes, in one instruction: an assignment of a uint4 becomes four where the compiler does not
/// see that what it made of the address is a multiple of 16.
__device__ __forceinline__ void store_words(void* place, const u32 (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
/// 16 bytes, read each time.
__device__ __forceinline__ void reload_words(u32 (&x)[4], const void* place) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(place));
}
