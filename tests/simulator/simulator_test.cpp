//===- simulator_test.cpp - What the simulator runs, and what it catches -----===//
//
// Kernels of its own, ring.cu and tensors.cu, for what the kernels of templates/ do not show: they
// are launched through the driver's stand-in.
//
//===----------------------------------------------------------------------===//

#include "generator/templates.h"
#include "runtime/driver/driver.h"
#include "runtime/nvrtc/nvrtc.h"
#include "tests/simulator/mistakes.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <gtest/gtest.h>
#include <sstream>

using namespace sagebwd;

namespace {

/// A file of this folder, else a template.
std::string source(std::string_view path) {
  std::ifstream file(SIMULATOR_FOLDER "/" + std::string(path));
  if (path.find('/') != path.npos || !file)
    return embedded_template(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class Kernel {
public:
  explicit Kernel(const char* file) {
    const std::string text = "#define KERNEL simulated\n" + expanded(file, source);
    const driver::DeviceScope device(0);
    function_ = driver::get_function(
        driver::load_module(Nvrtc::instance().compile(file, text, "sm_90a").cubin), "simulated");
  }
  /// Says what went wrong.
  template <class Params>
  std::string launch(unsigned blocks, unsigned threads, const Params& params, int seed = 0) const {
    setenv("SIMULATOR_SEED", std::to_string(seed).c_str(), 1);
    const driver::DeviceScope device(0);
    try {
      Params copy = params;
      driver::launch(function_, blocks, 1, 1, threads, 0, nullptr, &copy);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

private:
  driver::Function function_;
};

/// On the simulated GPU, whose memory is this process's.
template <class T> class Array {
public:
  explicit Array(size_t count) : count_(count) {
    const driver::DeviceScope device(0);
    data_ = reinterpret_cast<T*>(driver::allocate(count * sizeof(T)));
  }
  ~Array() { driver::release(reinterpret_cast<driver::Pointer>(data_)); }
  Array(const Array&) = delete;
  T* data() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }
  void fill(T x) { std::fill(data_, data_ + count_, x); }

private:
  T* data_;
  size_t count_;
};

class Ring : public testing::Test {
protected:
  static constexpr int kBlocks = 5, kCount = 8, kWidth = 256;

  static const Kernel& kernel() {
    static const Kernel kernel("ring.cu");
    return kernel;
  }
  /// Tells what went wrong, in the launch or with its results.
  std::string run(Mistake mistake, int seed) {
    struct {
      const float* tiles;
      float* sums;
      unsigned* orders;
      int count, mistake;
    } params{tiles.data(), sums.data(), orders.data(), kCount, mistake};
    unsigned order = 0;
    for (int i = 0; i < kCount; ++i)
      order = (order * 3 + 1) * 3 + 2;
    for (int i = 0; i < kBlocks * kCount * kWidth; ++i)
      tiles[i] = static_cast<float>(i % 1009);
    sums.fill(1);
    orders.fill(0);
    const std::string error = kernel().launch(kBlocks, 384, params, seed);
    if (!error.empty())
      return error;
    for (int i = 0; i < kWidth; ++i) {
      float sum = 1;
      for (int tile = 0; tile < kBlocks * kCount; ++tile)
        sum += tiles[tile * kWidth + i];
      if (sums[i] != sum)
        return "wrong sums";
    }
    return std::count(orders.data(), orders.data() + kBlocks, order) == kBlocks ? ""
                                                                                : "wrong order";
  }

  Array<float> tiles{kBlocks * kCount * kWidth}, sums{kWidth};
  Array<unsigned> orders{kBlocks};
};

TEST_F(Ring, SumsWhatItReads) {
  for (int seed = 0; seed < 20; ++seed)
    EXPECT_EQ(run(NONE, seed), "") << "seed " << seed;
}

TEST_F(Ring, MistakesAreCaught) {
  // Seed 0 shows a stage's mistake in one way, which is told here; other seeds show it in several.
  const std::pair<Mistake, const char*> mistakes[] = {
      {NO_WAIT_FOR_EMPTY, "an arrival too many in phase 0 of the mbarrier at 0"},
      {NO_ARRIVE, "at the mbarrier at 24, parity 0, which misses 1 arrivals and 0 bytes, in line"},
      {ARRIVAL_TOO_MANY, "an arrival too many in phase 0 of the mbarrier at 0"},
      {WRONG_PARITY,
       "at the mbarrier at 0, parity 0, which misses 1 arrivals and 0 bytes, in line"},
      {PARITY_NOT_TURNED, "an arrival too many in phase 1 of the mbarrier at 0"},
      {NO_WAIT_FOR_FULL, "an arrival too many in phase 0 of the mbarrier at"},
      {TOO_MANY_BYTES, "at the mbarrier at 0, parity 0, which misses 0 arrivals and 16 bytes, in"},
      {TOO_FEW_BYTES, "bytes that nobody announced in line"},
      {COPY_FORGOTTEN, "at the mbarrier at 8, parity 0, which misses 0 arrivals and 512 bytes, in"},
      {MISALIGNED, "a misaligned bulk copy of 512 bytes to 136 in line"},
      {NO_INIT, "no mbarrier has been initialised at 24 in line"},
      {NO_PUBLISH, "the mbarrier at 0, which is not published, in line"},
      {NO_SYNCTHREADS, "no synchronisation since the mbarrier at"},
      {NO_PROXY_FENCE, "without fence.proxy.async behind it in line"},
      {NO_WAIT_READ, "ends while its bulk adds may still read shared memory"},
      {WRONG_COUNT, "threads, but of"},
      {NOT_WHOLE_WARPS, "of 255 threads in line"},
      {NO_BAR_ARRIVE, "at bar.sync 2, which 128 of 256 threads have reached, in line"},
      {TOO_FEW_GIVEN, "at setmaxnreg to 240 from 168 with 64 left in the pool in line"},
      {MORE_THAN_HELD, "give_registers to 176 where there are 168 in line"},
      {GIVEN_BY_THREE_WARPS, "at setmaxnreg, which not all of the warpgroup have reached, in line"},
      {ELECTED_BY_HALF, "lanes 16 to 31 at elect.sync in line"},
      {INITIALISED_TWICE, "the mbarrier at 0 is initialised twice in line"},
      {WRITTEN_OVER, "the mbarrier at 0 has been written over in line"},
  };
  for (const auto& [mistake, text] : mistakes) {
    const std::string told = run(mistake, 0);
    EXPECT_NE(told.find(text), told.npos) << "mistake " << mistake << ": " << told;
    for (int seed = 1; seed < 4; ++seed)
      EXPECT_NE(run(mistake, seed), "") << "mistake " << mistake << ", seed " << seed;
  }
  EXPECT_EQ(run(NONE, 0), "");
}

TEST_F(Ring, SeedsBringOutARace) {
  int caught = 0;
  for (int seed = 1; seed < 20; ++seed)
    caught += run(ARRIVAL_BEFORE_READ, seed) != "";
  EXPECT_GT(caught, 10);
}

/// A tensor [4][5][300][160] of bytes, or of half as many bf16, which are all finite.
class Tensors : public testing::Test {
protected:
  static constexpr int kOuter = 20, kRows = 300, kInner = 160;

  struct alignas(64) Map {
    uint64_t words[16];
  };
  struct Params {
    Map map;
    int first[4];
    unsigned bytes, pitch;
    int columns;
    bool transposed;
    unsigned char* box;
    int* products;
    int mistake;
  };

  Tensors() {
    for (int i = 0; i < kOuter * kRows * kInner; ++i)
      bytes[i] = static_cast<unsigned char>(i * 2654435761u >> 13) & (i % 2 ? 0xbf : 0xff);
  }
  static const Kernel& kernel() {
    static const Kernel kernel("tensors.cu");
    return kernel;
  }
  struct Box {
    int element_bytes, swizzle; // 0, 64, 128
    unsigned extents[4];        // of the box
    int first[4];
  };
  /// The driver's signature; its enumerations are int.
  using Encode = int(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                     const uint32_t*, int, int, int, int);
  static int encode(Map& map, void* data, const Box& box) {
    static const auto function = reinterpret_cast<Encode*>(
        dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuTensorMapEncodeTiled"));
    const uint64_t extents[4] = {static_cast<uint64_t>(kInner / box.element_bytes), kRows, 5, 4};
    const uint64_t strides[3] = {kInner, kRows * kInner, 5 * kRows * kInner};
    const unsigned ones[4] = {1, 1, 1, 1};
    return function(&map, box.element_bytes == 2 ? 9 : 0, 4, data, extents, strides, box.extents,
                    ones, 0, box.swizzle == 0 ? 0 : box.swizzle / 64 + 1, 0, 0);
  }
  Params params_of(const Box& wanted) {
    Params params{};
    EXPECT_EQ(encode(params.map, bytes.data(), wanted), 0);
    std::copy_n(wanted.first, 4, params.first);
    params.bytes = wanted.element_bytes;
    for (unsigned extent : wanted.extents)
      params.bytes *= extent;
    params.box = box.data(), params.products = products.data();
    return params;
  }
  /// Gives a box, row after row, before it is swizzled.
  std::vector<unsigned char> expected(const Box& box) const {
    std::vector<unsigned char> all;
    const int inner = static_cast<int>(box.extents[0]) * box.element_bytes;
    for (int c = box.first[3]; c < box.first[3] + int(box.extents[3]); ++c)
      for (int b = box.first[2]; b < box.first[2] + int(box.extents[2]); ++b)
        for (int a = box.first[1]; a < box.first[1] + int(box.extents[1]); ++a)
          for (int i = 0; i < inner; ++i) {
            const int byte = box.first[0] * box.element_bytes + i;
            const bool inside = c >= 0 && c < 4 && b >= 0 && b < 5 && a >= 0 && a < kRows &&
                                byte >= 0 && byte < kInner;
            all.push_back(inside ? bytes[((c * 5 + b) * kRows + a) * kInner + byte] : 0);
          }
    return all;
  }
  Array<unsigned char> bytes{kOuter * kRows * kInner}, box{65536};
  Array<int> products{512 * 256};
};

TEST_F(Tensors, BoxesArriveSwizzledAndPaddedWithZeros) {
  const Box boxes[] = {
      {1, 0, {32, 8, 1, 1}, {0, 0, 0, 0}},        {1, 0, {160, 3, 2, 2}, {0, 5, 1, 2}},
      {2, 0, {16, 8, 3, 2}, {-3, -2, -1, 3}},     {2, 0, {80, 16, 2, 1}, {7, 290, 4, 1}},
      {1, 128, {128, 64, 1, 1}, {0, 13, 4, 3}},   {1, 128, {128, 40, 3, 2}, {64, 280, 3, 3}},
      {2, 128, {64, 100, 1, 2}, {-7, -5, 0, -1}}, {1, 64, {64, 256, 1, 1}, {100, 1, 2, 3}},
      {2, 64, {32, 24, 5, 4}, {60, -10, 0, 0}},   {1, 0, {16, 4, 1, 1}, {400, 0, 0, 0}},
  };
  for (const Box& wanted : boxes) {
    const Params params = params_of(wanted);
    const std::vector<unsigned char> all = expected(wanted);
    box.fill(1);
    ASSERT_EQ(kernel().launch(1, 32, params), "");
    for (size_t i = 0; i < all.size(); ++i) {
      // tile/memory/shared_tile.cuh: chunk c of a row lies at c ^ f(row).
      const size_t row = wanted.swizzle ? i / wanted.swizzle : 0;
      const size_t f = wanted.swizzle == 0 ? 0 : wanted.swizzle == 128 ? row % 8 : row / 2 % 4;
      ASSERT_EQ(box[i ^ f << 4], all[i]) << "byte " << i << " of box " << &wanted - boxes;
    }
  }
}

TEST_F(Tensors, WgmmaReadsThem) {
  for (const int pitch : {64, 128})
    for (const auto& [groups, columns] :
         {std::pair(1, 64), {2, 128}, {3, 192}, {4, 256}, {5, 64}, {8, 256}}) {
      const Box wanted{1, pitch, {unsigned(pitch), unsigned(columns), 1, 1}, {0, 0, 1, 2}};
      Params params = params_of(wanted);
      params.pitch = pitch, params.columns = columns;
      ASSERT_EQ(kernel().launch(1, groups * 128, params, groups - 1), "");
      const std::vector<unsigned char> all = expected(wanted);
      for (int row = 0; row < 64 * groups; ++row)
        for (int column = 0; column < columns; ++column) {
          int sum = 0;
          for (int k = 0; k < pitch; ++k)
            sum += static_cast<signed char>(all[row % columns * pitch + k]) *
                   static_cast<signed char>(all[column * pitch + k]);
          ASSERT_EQ(products[row * columns + column], sum) << row << ", " << column;
        }
    }
}

TEST_F(Tensors, WgmmaReadsPanelsOfColumns) {
  for (const unsigned panels : {1, 2, 3, 4}) {
    const Box wanted{2, 128, {64, 16, panels, 1}, {0, 3, 0, 1}};
    Params params = params_of(wanted);
    params.pitch = 128, params.columns = 64 * panels, params.transposed = true;
    ASSERT_EQ(kernel().launch(1, 128, params), "");
    const std::vector<unsigned char> all = expected(wanted);
    for (int row = 0; row < 64; ++row)
      for (int column = 0; column < params.columns; ++column) {
        uint16_t bits;
        std::memcpy(&bits, &all[(column / 64 * 16 + row % 16) * 128 + column % 64 * 2], 2);
        EXPECT_EQ(std::bit_cast<float>(products[row * params.columns + column]),
                  std::bit_cast<float>(bits << 16))
            << row << ", " << column;
      }
  }
}

TEST_F(Tensors, MistakesAreCaught) {
  Map map;
  EXPECT_NE(encode(map, bytes.data() + 8, {1, 128, {128, 8, 1, 1}, {}}), 0);
  EXPECT_NE(encode(map, bytes.data(), {1, 128, {64, 8, 1, 1}, {}}), 0);
  EXPECT_NE(encode(map, bytes.data(), {2, 0, {4, 8, 1, 1}, {}}), 0);
  EXPECT_NE(encode(map, bytes.data(), {1, 0, {16, 257, 1, 1}, {}}), 0);

  const auto caught = [&](const Params& params, const char* text) {
    const std::string told = kernel().launch(1, 128, params);
    EXPECT_NE(told.find(text), told.npos) << told;
  };
  Params params = params_of({1, 128, {128, 64, 1, 1}, {0, kRows - 32, 0, 0}});
  params.bytes /= 2; // what lies outside the tensor counts, too
  caught(params, "of the mbarrier at 0 has had 4096 bytes that nobody announced in line");
  params.bytes *= 2, params.pitch = 128, params.columns = 64;
  params.mistake = WGMMA_BY_THREE_WARPS;
  caught(params, "warp 3 has not executed every wgmma of its warpgroup");
  params.map.words[0] = 0;
  caught(params, "no tensor map in line");
  caught(params_of({1, 0, {160, 256, 2, 1}, {}}), "a bulk copy beyond shared memory");
}

} // namespace
