#pragma once

// Of C++'s library nothing is included: <atomic> alone takes as long as a kernel (lane.h).
extern "C" int sched_yield() noexcept;

inline u32 take_ticket(u32* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST); }
inline void count_behind(u32* counter) { take_ticket(counter); }
inline u32 read_counter(const u32* counter) { return __atomic_load_n(counter, __ATOMIC_SEQ_CST); }
inline void wait_for_count(const u32* counter, u32 seen, u32 count, const char*) {
  for (; seen != count; seen = read_counter(counter))
    sched_yield();
}
