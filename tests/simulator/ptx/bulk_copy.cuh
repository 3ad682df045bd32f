#pragma once

inline void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier,
                      int line = __builtin_LINE()) {
  simulator::lane().bulk_copy(destination, source, bytes, barrier, line);
}

static_assert(sizeof(simulator::Tensor) <= sizeof(TensorMap));
inline void tensor_copy(u32 destination, const TensorMap& map, int i0, int i1, int i2, int i3,
                        u32 barrier, int line = __builtin_LINE()) {
  simulator::lane().tensor_copy(destination, &map, {i0, i1, i2, i3}, barrier, line);
}

inline void bulk_add(float* destination, u32 source, u32 bytes, int line = __builtin_LINE()) {
  simulator::lane().bulk_add(destination, source, bytes, line);
}
inline void bulk_add(fp16* destination, u32 source, u32 bytes, int line = __builtin_LINE()) {
  simulator::lane().bulk_add(&destination->bits, source, bytes, line);
}
inline void bulk_commit() { simulator::lane().commit_bulk(); }
template <int PENDING> void bulk_wait_read() { simulator::lane().wait_for_bulk_reads(PENDING); }
