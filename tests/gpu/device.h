//===- device.h - Device memory that shows what was written to it ----------===//
//
// All of it starts as 0xff bytes: NaN in bf16, fp16 and FP32, and never what a kernel stores (its
// NaNs are 0x7fff and 0x7fffffff).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/attention.h"
#include "runtime/driver/driver.h"
#include "runtime/reference/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

namespace sagebwd::test {

inline constexpr uint8_t kPoison = 0xff;

/// Skips by name where there is no GPU; else GPU 0's context is current.
class OnGpu : public testing::Test {
protected:
  void SetUp() override {
    if (const std::string& why = driver::unavailable(); !why.empty())
      GTEST_SKIP() << "no GPU: " << why;
    scope_.emplace(0);
  }

private:
  std::optional<driver::DeviceScope> scope_;
};

/// Device memory with a guard band on either side.
class Buffer {
public:
  explicit Buffer(size_t bytes, uint8_t start = kPoison)
      : bytes_(bytes), memory_(driver::allocate(bytes + 2 * kGuard)) {
    driver::fill(memory_, kPoison, bytes + 2 * kGuard);
    if (start != kPoison)
      driver::fill(pointer(), start, bytes);
  }
  ~Buffer() { driver::release(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  driver::Pointer pointer() const { return memory_ + kGuard; }
  template <typename T = void> T* as() const { return reinterpret_cast<T*>(pointer()); }
  size_t bytes() const { return bytes_; }

  template <typename T> void upload(const std::vector<T>& values) {
    ASSERT_EQ(values.size() * sizeof(T), bytes_);
    driver::copy_to_device(pointer(), values.data(), bytes_);
  }
  template <typename T> std::vector<T> download() const {
    std::vector<T> values(bytes_ / sizeof(T));
    driver::copy_to_host(values.data(), pointer(), bytes_);
    return values;
  }
  void expect_guards_untouched(const char* name) const {
    std::vector<uint8_t> all(bytes_ + 2 * kGuard);
    driver::copy_to_host(all.data(), memory_, all.size());
    const auto touched = [](uint8_t byte) { return byte != kPoison; };
    EXPECT_TRUE(std::none_of(all.begin(), all.begin() + kGuard, touched)) << "before " << name;
    EXPECT_TRUE(std::none_of(all.end() - kGuard, all.end(), touched)) << "after " << name;
  }

private:
  static constexpr size_t kGuard = 4096; ///< keeps the driver's alignment of 256 bytes
  size_t bytes_;
  driver::Pointer memory_;
};

/// Where the elements of a (batch, head, token, channel) tensor lie. `padding` elements (a multiple
/// of 8) follow each token.
struct Layout {
  bool bshd = false;
  int64_t padding = 0;
};

/// A tensor of 16-bit elements in device memory.
class DeviceTensor {
public:
  DeviceTensor(DType dtype, int64_t batch, int64_t heads, int64_t tokens, int64_t channels,
               Layout layout)
      : dtype_(dtype), sizes_{batch, heads, tokens, channels},
        buffer_(2 * batch * heads * tokens * (channels + layout.padding)) {
    const int64_t row = channels + layout.padding;
    view_ = {buffer_.as(), heads * tokens * row, layout.bshd ? row : tokens * row,
             layout.bshd ? heads * row : row};
  }

  const Tensor& view() const { return view_; }

  /// From contiguous values; padding stays NaN.
  void upload(const std::vector<float>& values) {
    std::vector<uint16_t> bits(buffer_.bytes() / 2, kUnwritten);
    ASSERT_EQ(values.size(), static_cast<size_t>(sizes_[0] * sizes_[1] * sizes_[2] * sizes_[3]));
    for_each([&](size_t at, size_t i) { bits[at] = reference::encode(dtype_, values[i]); });
    buffer_.upload(bits);
  }

  /// To contiguous values. Fails where an element is not written, or anything else is.
  std::vector<float> download_checked(const char* name) const {
    std::vector<uint16_t> bits = buffer_.download<uint16_t>();
    std::vector<float> values(sizes_[0] * sizes_[1] * sizes_[2] * sizes_[3]);
    size_t unwritten = 0;
    for_each([&](size_t at, size_t i) {
      unwritten += bits[at] == kUnwritten;
      values[i] = reference::decode(dtype_, bits[at]);
      bits[at] = kUnwritten;
    });
    EXPECT_EQ(unwritten, 0u) << "elements of " << name << " were not written";
    EXPECT_TRUE(std::all_of(bits.begin(), bits.end(), [](uint16_t x) { return x == kUnwritten; }))
        << name << ": the padding between tokens was written to";
    buffer_.expect_guards_untouched(name);
    return values;
  }

private:
  static constexpr uint16_t kUnwritten = 0xffff;

  /// Calls with the place in memory and the index in contiguous order.
  template <typename Visit> void for_each(Visit visit) const {
    size_t index = 0;
    for (int64_t b = 0; b < sizes_[0]; ++b)
      for (int64_t h = 0; h < sizes_[1]; ++h)
        for (int64_t s = 0; s < sizes_[2]; ++s)
          for (int64_t c = 0; c < sizes_[3]; ++c)
            visit(b * view_.stride_b + h * view_.stride_h + s * view_.stride_s + c, index++);
  }

  DType dtype_;
  int64_t sizes_[4];
  Buffer buffer_;
  Tensor view_;
};

} // namespace sagebwd::test
