#pragma once

inline void init_mbarrier(u32 barrier, int arrivals, int line = __builtin_LINE()) {
  simulator::lane().init_mbarrier(barrier, arrivals, line);
}
inline void publish_mbarriers() { simulator::lane().publish_mbarriers(); }
inline void arrive(u32 barrier, int line = __builtin_LINE()) {
  simulator::lane().arrive(barrier, 0, line);
}
inline void arrive_expecting(u32 barrier, u32 bytes, int line = __builtin_LINE()) {
  simulator::lane().arrive(barrier, bytes, line);
}
inline void wait_for_phase(u32 barrier, u32 parity, const char* = nullptr,
                           int line = __builtin_LINE()) {
  simulator::lane().wait_for_phase(barrier, parity, line);
}
