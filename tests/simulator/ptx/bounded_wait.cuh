//===- ptx/bounded_wait.cuh - Waits that end: the simulator's always do --------===//
#pragma once
