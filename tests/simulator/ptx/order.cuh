#pragma once

#include <atomic>
#include <thread>

inline u32 take_ticket(u32* counter) { return std::atomic_ref(*counter).fetch_add(1); }
inline void count_behind(u32* counter) { std::atomic_ref(*counter).fetch_add(1); }
inline u32 read_counter(const u32* counter) {
  return std::atomic_ref(*const_cast<u32*>(counter)).load();
}
inline void wait_for_count(const u32* counter, u32 seen, u32 count, const char*) {
  for (; seen != count; seen = read_counter(counter))
    std::this_thread::yield();
}
