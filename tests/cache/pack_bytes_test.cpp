//===- pack_bytes_test.cpp - Packs that are damaged or forged --------------===//
//
// Random damage is in mutation_test.cpp; here is what someone would think of.
//
//===----------------------------------------------------------------------===//

#include "cache/entry.h"
#include "cache/pack.h"
#include "tests/cache/temp_directory.h"

#include "llvm/ADT/StringExtras.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace sagebwd;
using test::TempDirectory;

namespace {

std::string plain_kernel(int number) {
  CacheEntry entry;
  entry.kernel_name = "kernel_" + std::to_string(number);
  entry.cubin.assign(300, static_cast<char>(number));
  return serialize(make_key({{"number", std::to_string(number)}}), entry);
}

/// A file that is in memory only: thousands of them cost nothing.
class MemoryFile {
public:
  MemoryFile() { ::fchmod(file_, 0600); }
  ~MemoryFile() { ::close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string holding(const std::string& bytes) {
    EXPECT_EQ(::ftruncate(file_, 0), 0);
    EXPECT_EQ(::pwrite(file_, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    return "/proc/self/fd/" + std::to_string(file_);
  }

private:
  int file_ = ::memfd_create("pack", MFD_CLOEXEC);
};

/// Gives what an attempt is refused with.
std::string refusal(const std::function<void()>& attempt) {
  try {
    attempt();
  } catch (const PackError& error) {
    return error.what();
  }
  return "";
}
std::string refusal(const std::string& path) {
  return refusal([&] { Pack::open(path); });
}

TEST(PackBytes, EveryTruncationIsRefused) {
  TempDirectory temp;
  write_pack(temp / "p.pack", {plain_kernel(1), plain_kernel(2)});
  const std::string bytes = test::read_text(temp / "p.pack");
  MemoryFile file;
  for (size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_NE(refusal(file.holding(bytes.substr(0, size))), "") << size;
  }
  EXPECT_EQ(refusal(file.holding(bytes)), "");
  EXPECT_NE(refusal(file.holding(bytes + "x")), "");
}

TEST(PackBytes, EveryFlippedBitOfHeaderAndIndexIsRefused) {
  TempDirectory temp;
  write_pack(temp / "p.pack", {plain_kernel(1), plain_kernel(2)});
  const std::string bytes = test::read_text(temp / "p.pack");
  MemoryFile file;
  constexpr size_t kIndexEnd = 88 + 2 * 48;
  for (size_t bit = 0; bit < 8 * kIndexEnd; ++bit) {
    std::string changed = bytes;
    changed[bit / 8] ^= static_cast<char>(1 << bit % 8);
    ASSERT_NE(refusal(file.holding(changed)), "") << "bit " << bit;
  }
}

/// A pack as someone would forge it: whatever index, with a right checksum.
struct ForgedPack {
  uint32_t count = 0;
  uint64_t manifest_bytes = 2;
  struct Row {
    char digest;
    uint64_t offset, bytes;
  };
  std::vector<Row> rows;
  std::string tail = "{}";

  static std::string little(uint64_t value, int bytes) {
    std::string text;
    for (int i = 0; i < bytes; ++i)
      text.push_back(static_cast<char>(value >> (8 * i)));
    return text;
  }
  std::string bytes() const {
    auto sha = [](const std::string& text) { return llvm::fromHex(sha256_hex(text)); };
    std::string body = little(count, 4) + little(manifest_bytes, 8) + sha("{}");
    for (const Row& row : rows)
      body += std::string(32, row.digest) + little(row.offset, 8) + little(row.bytes, 8);
    return "SAGEBWDP" + little(1, 4) + sha(body) + body + tail;
  }
};

TEST(PackBytes, ForgedIndicesAreRefused) {
  MemoryFile file;
  auto check = [&](const ForgedPack& forged) { return refusal(file.holding(forged.bytes())); };
  constexpr uint64_t kHuge = ~uint64_t{0};
  const uint64_t first = 88 + 2 * 48 + 2;
  auto two = [&](ForgedPack::Row a, ForgedPack::Row b) {
    return ForgedPack{2, 2, {a, b}, "{}" + std::string(20, 'x')};
  };
  // The forgery itself is right, so what follows is refused for its index.
  ASSERT_EQ(check(two({'a', first, 10}, {'b', first + 10, 10})), "");
  EXPECT_NE(check(two({'b', first, 10}, {'a', first + 10, 10})), "") << "unsorted";
  EXPECT_NE(check(two({'a', first, 10}, {'a', first + 10, 10})), "") << "a digest twice";
  EXPECT_NE(check(two({'a', first, 10}, {'b', first, 20})), "") << "overlapping";
  EXPECT_NE(check(two({'a', first, 10}, {'b', first + 15, 5})), "") << "a gap";
  EXPECT_NE(check(two({'a', first - 5, 15}, {'b', first + 10, 10})), "") << "in the manifest";
  EXPECT_NE(check(two({'a', first, 10}, {'b', first + 10, 11})), "") << "beyond the file";
  EXPECT_NE(check(two({'a', first, 10}, {'b', first + 10, 9})), "") << "short of the file";
  EXPECT_NE(check(two({'a', first, kHuge}, {'b', first - 1, 10})), "") << "wrapping around";
  EXPECT_NE(check({0xffffffff, 2, {}, "{}"}), "") << "more items than bytes";
  EXPECT_NE(check({0, kHuge, {}, "{}"}), "") << "a manifest of 2^64 bytes";
  EXPECT_NE(check({0, 3, {}, "{}"}), "") << "a manifest beyond the file";
}

TEST(PackBytes, ASparseFileOfTerabytesCostsNothing) {
  TempDirectory temp;
  test::write_text(temp / "f.pack", ForgedPack{0xffffffff, 2, {}, "{}"}.bytes());
  if (::truncate((temp / "f.pack").c_str(), off_t{1} << 42) != 0)
    GTEST_SKIP() << "the file system has no sparse files of this size";
  auto start = std::chrono::steady_clock::now();
  EXPECT_NE(refusal(temp / "f.pack"), "");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1)); // hours, if read
}

TEST(PackBytes, AWrongManifestIsNoticedWhenRead) {
  TempDirectory temp;
  ForgedPack forged;
  forged.tail = "{]";
  test::write_text(temp / "f.pack", forged.bytes());
  auto pack = Pack::open(temp / "f.pack");
  EXPECT_TRUE(refusal([&] { pack->manifest(); }).find("manifest is corrupt") != std::string::npos);
}

} // namespace
