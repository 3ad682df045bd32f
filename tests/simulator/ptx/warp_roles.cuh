#pragma once

template <int THREADS> void named_barrier_sync(int barrier, int line = __builtin_LINE()) {
  simulator::lane().named_barrier(barrier, THREADS, true, line);
}
template <int THREADS> void named_barrier_arrive(int barrier, int line = __builtin_LINE()) {
  simulator::lane().named_barrier(barrier, THREADS, false, line);
}

template <int REGISTERS> void give_registers(int line = __builtin_LINE()) {
  simulator::lane().set_registers(REGISTERS, false, line);
}
template <int REGISTERS> void take_registers(int line = __builtin_LINE()) {
  simulator::lane().set_registers(REGISTERS, true, line);
}

inline bool elected(int line = __builtin_LINE()) {
  int nothing = 0;
  simulator::together("elect.sync", line, nothing, [](simulator::Lanes<int>) {});
  return threadIdx.x % 32 == 0;
}

inline int common_to_warp(int x, int line = __builtin_LINE()) {
  simulator::together("common_to_warp", line, x, [](simulator::Lanes<int> lanes) {
    for (int i = 0; i < 32; ++i)
      if (lanes[i] != lanes[0])
        simulator::lane().fail("lanes differ in what is common to their warp: lane", i);
  });
  return x;
}
