#pragma once

inline void cp_async_16_or_zeros(u32 shared_address, const void* global, bool valid) {
  if (reinterpret_cast<u64>(global) % 16 != 0)
    simulator::lane().fail("misaligned global address", reinterpret_cast<s64>(global));
  simulator::lane().copy(shared_address, valid ? global : nullptr);
}
inline void cp_async_16(u32 shared_address, const void* global) {
  cp_async_16_or_zeros(shared_address, global, true);
}
inline void cp_async_16_if(u32 shared_address, const void* global, bool wanted) {
  if (wanted)
    cp_async_16(shared_address, global);
}
inline void cp_async_commit() { simulator::lane().commit_copies(); }
template <int PENDING> void cp_async_wait() { simulator::lane().wait_for_copies(PENDING); }
