//===- bulk_copies.cpp - cp.async.bulk ---------------------------------------===//

#include "tests/simulator/formats.h"
#include "tests/simulator/machine.h"

#include <algorithm>
#include <array>
#include <atomic>

namespace simulator {

namespace {

/// Gives the place with bit 4 and those above XORed with bit 7 and those above, within a row of so
/// many bytes.
unsigned swizzled(unsigned place, unsigned row_bytes) {
  return row_bytes == 0 ? place : place ^ (place >> 7 & (row_bytes / 16 - 1)) << 4;
}

/// Zeros where an index lies outside the tensor.
void copy_box(const Tensor& tensor, const int (&first)[4], char* shared, unsigned to) {
  const unsigned size = tensor.element_bytes;
  const auto inside = [&](int dimension, long index) {
    return index >= 0 && index < tensor.extents[dimension];
  };
  for (unsigned row = 0; row < tensor.box[1] * tensor.box[2] * tensor.box[3]; ++row) {
    const long index[3] = {long(first[1]) + row % tensor.box[1],
                           long(first[2]) + row / tensor.box[1] % tensor.box[2],
                           long(first[3]) + row / tensor.box[1] / tensor.box[2]};
    const char* from = tensor.address;
    bool row_inside = true;
    for (int i = 0; i < 3; ++i) {
      row_inside &= inside(i + 1, index[i]);
      from += index[i] * static_cast<long>(tensor.strides[i]);
    }
    for (unsigned i = 0; i < tensor.box[0]; ++i, to += size) {
      char* place = shared + swizzled(to, tensor.swizzle);
      if (row_inside && inside(0, long(first[0]) + i))
        std::memcpy(place, from + (long(first[0]) + i) * size, size);
      else
        std::memset(place, 0, size);
    }
  }
}

void add(float* to, const char* from, unsigned bytes) {
  for (unsigned i = 0; i < bytes / 4; ++i) {
    float x;
    std::memcpy(&x, from + 4 * i, 4);
    std::atomic_ref(to[i]) += x;
  }
}
/// FP32 has twice the bits of FP16 and two more: rounded to it first, a sum rounds to the same.
void add(unsigned short* to, const char* from, unsigned bytes) {
  for (unsigned i = 0; i < bytes / 2; ++i) {
    unsigned short x;
    std::memcpy(&x, from + 2 * i, 2);
    const std::atomic_ref place(to[i]);
    unsigned short before = place.load(), after;
    do
      after = static_cast<unsigned short>(fp16_of_float(float_of_fp16(before) + float_of_fp16(x)));
    while (!place.compare_exchange_weak(before, after));
  }
}

} // namespace

/// From here on until the copy has taken place nobody knows what is there.
void Fiber::start_bulk_copy(unsigned to, unsigned bytes, unsigned barrier_address, int line,
                            std::function<void()> take_place) {
  if (to % 16 != 0 || bytes % 16 != 0)
    fail_in(line, "a misaligned bulk copy of " + std::to_string(bytes) + " bytes to " +
                      std::to_string(to));
  if (to > shared_bytes || bytes > shared_bytes - to)
    fail_in(line, "a bulk copy beyond shared memory, of " + std::to_string(bytes) + " bytes to " +
                      std::to_string(to));
  Mbarrier& barrier = mbarrier(barrier_address, line);
  if (!barrier.published)
    fail_in(line, "a bulk copy to " + barrier.name() + ", which is not published,");
  std::memset(shared + to, kPoison, bytes);
  home->under_way.push_back({this, line, &barrier, bytes, std::move(take_place)});
  home->perhaps_yield(*this);
}
void Fiber::bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier, int line) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail_in(line, "a misaligned source of a bulk copy");
  start_bulk_copy(to, bytes, barrier, line,
                  [=, place = shared + to] { std::memcpy(place, from, bytes); });
}
void Fiber::tensor_copy(unsigned to, const void* map, const int (&first)[4], unsigned barrier,
                        int line) {
  Tensor tensor;
  std::memcpy(&tensor, map, sizeof(tensor));
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0 || tensor.mark != Tensor::kMark)
    fail_in(line, "no tensor map");
  if (to % 128 != 0)
    fail_in(line, "a tensor copy to " + std::to_string(to) + ", no multiple of 128,");
  unsigned bytes = tensor.element_bytes;
  for (unsigned extent : tensor.box)
    bytes *= extent;
  start_bulk_copy(
      to, bytes, barrier, line,
      [=, shared = shared, index = std::to_array({first[0], first[1], first[2], first[3]})] {
        copy_box(tensor, {index[0], index[1], index[2], index[3]}, shared, to);
      });
}

void Fiber::bulk_add(float* to, unsigned from, unsigned bytes, int line) {
  start_bulk_add({to, nullptr, from, bytes, bulk_group}, line);
}
void Fiber::bulk_add(unsigned short* fp16, unsigned from, unsigned bytes, int line) {
  start_bulk_add({nullptr, fp16, from, bytes, bulk_group}, line);
}
void Fiber::start_bulk_add(const BulkAdd& add, int line) {
  const unsigned from = add.from, bytes = add.bytes;
  const void* to = add.to ? static_cast<const void*>(add.to) : add.fp16;
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || from % 16 != 0 || bytes % 16 != 0)
    fail_in(line, "a misaligned bulk add of " + std::to_string(bytes) + " bytes from " +
                      std::to_string(from));
  if (from > shared_bytes || bytes > shared_bytes - from)
    fail_in(line, "a bulk add from beyond shared memory, of " + std::to_string(bytes) +
                      " bytes from " + std::to_string(from));
  for (unsigned word = from / 4; word < (from + bytes) / 4; ++word) {
    const unsigned writer = writers[word] % 1024;
    if (writers[word] && home->fiber(writer).fences + 1 == writers[word] / 1024)
      fail_in(line, "a bulk add of what thread " + std::to_string(writer) + " wrote to " +
                        std::to_string(4 * word) + " without fence.proxy.async behind it");
  }
  adds.push_back(add);
}
void Fiber::perform_adds(int last_group) {
  std::erase_if(adds, [&](const BulkAdd& due) {
    if (due.group > last_group)
      return false;
    if (due.to)
      add(due.to, shared + due.from, due.bytes);
    else
      add(due.fp16, shared + due.from, due.bytes);
    return true;
  });
}
void Fiber::commit_bulk() {
  if (home->coin())
    perform_adds(bulk_group);
  ++bulk_group;
}
void Fiber::wait_for_bulk_reads(int pending) { perform_adds(bulk_group - 1 - pending); }

} // namespace simulator
