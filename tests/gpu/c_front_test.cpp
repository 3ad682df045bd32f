//===- c_front_test.cpp - Norm and RoPE through C ----------------------------===//
//
// libsagebwd.so beside the functions of C++, whose results front_test.cpp compares with FP64.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/c_arguments.h"
#include "tests/gpu/device.h"

#include <cmath>
#include <functional>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using Parts = std::vector<std::string>;
using Bits = std::vector<std::vector<uint32_t>>;

constexpr Problem kProblem = {2, 4, 2, 70, 33};
constexpr int kChannels = 64, kRotated = 40, kBegin = 8;

/// Numbers between -1 and 1 that bf16 has.
std::vector<float> drawn(int64_t count, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) {
    seed = seed * 1664525u + 1013904223u;
    x = (static_cast<float>(seed >> 25) - 64) / 64;
  }
  return values;
}

class CFront : public OnGpu {
protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped())
      return;
    attention.emplace(AttentionSpec{.head_dim = kChannels});
    ASSERT_EQ(sagebwd_create("d64", 0, &c), SAGEBWD_OK) << sagebwd_last_error();
  }
  ~CFront() override { sagebwd_destroy(c); }

  /// The memory of the queries or of the keys.
  struct Side {
    int64_t batch = kProblem.batch, heads, tokens;
    uint32_t seed;
    DeviceTensor x = tensor(), y = tensor(), dx = tensor();
    Buffer gain{static_cast<size_t>(heads * kChannels) * sizeof(float)};
    Buffer inv_rms{static_cast<size_t>(batch * heads * tokens) * sizeof(float)};
    Buffer cos{static_cast<size_t>(batch * tokens * kRotated / 2) * sizeof(float)};
    Buffer sin{cos.bytes()}, dgain{gain.bytes()}, dinv_rms{inv_rms.bytes()};
    Buffer gain_parts;

    Side(int64_t of_heads, int64_t of_tokens, uint32_t drawn_by, int64_t part_floats)
        : heads(of_heads), tokens(of_tokens), seed(drawn_by),
          gain_parts(static_cast<size_t>(part_floats) * sizeof(float)) {
      x.upload(drawn(batch * heads * tokens * kChannels, seed));
      for (const Buffer* buffer : {&gain, &inv_rms, &cos, &sin}) {
        auto values = drawn(static_cast<int64_t>(buffer->bytes() / sizeof(float)), ++seed);
        const_cast<Buffer*>(buffer)->upload(values);
      }
    }
    DeviceTensor tensor() const {
      return DeviceTensor(DType::bf16, batch, heads, tokens, kChannels, {true, 8}, kPoison);
    }
    FrontSide side(bool given_rms) const {
      FrontSide s{.x = x.view(), .y = y.view(), .normed = true};
      s.rope = {cos.as<float>(), sin.as<float>(), tokens * kRotated / 2, kRotated / 2};
      if (given_rms)
        s.inv_rms = inv_rms.as<float>(), s.inv_rms_per_head = true;
      else
        s.gain = gain.as<float>(), s.gain_per_head = true;
      return s;
    }
    FrontSideGradients gradients(bool given_rms) const {
      FrontSideGradients s{.dx = dx.view()};
      if (given_rms)
        s.dinv_rms = dinv_rms.as<float>();
      else
        s.dgain = dgain.as<float>(), s.gain_parts = gain_parts.as<float>();
      return s;
    }
  };

  /// Returns what both functions write, by either door, in new memory. The queries have gains of
  /// their heads, and the keys 1/rms that is given.
  Bits results(bool by_c) {
    const int64_t parts[] = {front_part_floats(Tokens::queries, attention->spec(), kProblem),
                             front_part_floats(Tokens::keys, attention->spec(), kProblem)};
    Side q(kProblem.heads, kProblem.seq_q, 1, parts[0]);
    Side k(kProblem.heads_kv, kProblem.seq_kv, 100, parts[1]);
    const FrontCall call{.problem = kProblem,
                         .q = q.side(false),
                         .k = k.side(true),
                         .norm_eps = 0.25f,
                         .rope_begin = kBegin,
                         .rope_channels = kRotated,
                         .rope_interleaved = interleaved};
    const sagebwd_front_args args = for_c(call);
    driver::synchronize();
    if (by_c)
      EXPECT_EQ(sagebwd_front(c, &args, nullptr), SAGEBWD_OK) << sagebwd_last_error();
    else
      front(call, *attention);
    driver::synchronize();
    Faults faults;
    Bits bits = {bits_of(q.y.download("y of q", faults)), bits_of(k.y.download("y of k", faults))};
    q.y.upload(drawn(2 * 4 * 70 * 64, 7)), k.y.upload(drawn(2 * 2 * 33 * 64, 8));
    driver::synchronize();
    const FrontGradientsCall gradients{.of = call, .q = q.gradients(false), .k = k.gradients(true)};
    const sagebwd_front_gradients_args of_gradients = for_c(gradients, args);
    if (by_c)
      EXPECT_EQ(sagebwd_front_gradients(c, &of_gradients, nullptr), SAGEBWD_OK)
          << sagebwd_last_error();
    else
      front_gradients(gradients, *attention);
    driver::synchronize();
    bits.push_back(bits_of(q.dx.download("dx of q", faults)));
    bits.push_back(bits_of(k.dx.download("dx of k", faults)));
    bits.push_back(q.dgain.download<uint32_t>());
    bits.push_back(k.dinv_rms.download<uint32_t>());
    EXPECT_EQ(faults, Faults());
    return bits;
  }

  std::optional<Attention> attention;
  sagebwd_operation* c = nullptr;
  bool interleaved = false;
};

TEST_F(CFront, GivesTheSameBits) {
  const Bits halves = results(/*by_c=*/true);
  EXPECT_EQ(halves, results(/*by_c=*/false));
  interleaved = true;
  const Bits pairs = results(/*by_c=*/true);
  EXPECT_EQ(pairs, results(/*by_c=*/false));
  EXPECT_NE(pairs, halves) << "the style is not used";
}

TEST_F(CFront, SaysHowLargePartsAre) {
  const sagebwd_problem problem = for_c(kProblem);
  int64_t q = 0, k = 0;
  ASSERT_EQ(sagebwd_front_part_floats(c, &problem, &q, &k), SAGEBWD_OK) << sagebwd_last_error();
  EXPECT_EQ(q, front_part_floats(Tokens::queries, attention->spec(), kProblem));
  EXPECT_EQ(k, front_part_floats(Tokens::keys, attention->spec(), kProblem));
  EXPECT_EQ(sagebwd_front_part_floats(c, &problem, nullptr, nullptr), SAGEBWD_OK);
  expect_failed(sagebwd_front_part_floats(c, nullptr, &q, &k), SAGEBWD_INVALID,
                {"problem is null"});
  sagebwd_problem wrong = problem;
  wrong.seq_kv = -1;
  q = 1;
  expect_failed(sagebwd_front_part_floats(c, &wrong, &q, &k), SAGEBWD_INVALID, {"key length = -1"});
  EXPECT_EQ(q, 1);
}

/// Addresses that nothing reads: these calls launch nothing.
TEST_F(CFront, RefusalsAreStatusesWithMessages) {
  const auto at = [](uint64_t address) { return reinterpret_cast<float*>(address); };
  const auto tensor = [&](uint64_t address) {
    return sagebwd_tensor{at(address), 16384, 8192, 64};
  };
  sagebwd_front_args good{.struct_size = sizeof(good), .problem = {1, 2, 2, 128, 128}};
  good.q = {.x = tensor(0x100000), .y = tensor(0x200000), .normed = 1, .gain = at(0x1000)};
  good.k = {.x = tensor(0x300000), .y = tensor(0x400000)};
  good.k.rope = {at(0x5000), at(0x9000), 0, 32};
  good.norm_eps = 1e-6f, good.rope_channels = 64;
  const auto refused = [&](const Parts& parts,
                           const std::function<void(sagebwd_front_args&)>& change) {
    sagebwd_front_args args = good;
    change(args);
    expect_failed(sagebwd_front(c, &args, nullptr), SAGEBWD_INVALID, parts);
  };
  refused({"q.x: the address is null"}, [](auto& a) { a.q.x.data = nullptr; });
  refused({"k.y: the token stride is 68"}, [](auto& a) { a.k.y.stride_s = 68; });
  refused({"k.gain: it is given without a norm"}, [&](auto& a) { a.k.gain = at(0x1000); });
  refused({"one of cos and sin is null"}, [](auto& a) { a.k.rope.sin = nullptr; });
  refused({"k.rope.cos: the token stride is 33"}, [](auto& a) { a.k.rope.stride_s = 33; });
  refused({"rope_channels = 60"}, [](auto& a) { a.rope_channels = 60; });
  refused({"rope_begin = 4 with 64"}, [](auto& a) { a.rope_begin = 4; });
  refused({"norm_eps = nan"}, [](auto& a) { a.norm_eps = NAN; });
  refused({"share memory"}, [](auto& a) { a.q.y = a.q.x; });
  refused({"heads = 3", "key/value heads = 2"}, [](auto& a) { a.problem.heads = 3; });
  refused({"q.normed = 2 is not supported", "0 for none"}, [](auto& a) { a.q.normed = 2; });
  refused({"k.gain_per_head = -1 is not"}, [](auto& a) { a.k.gain_per_head = -1; });
  refused({"q.inv_rms_per_head = 3 is not"}, [](auto& a) { a.q.inv_rms_per_head = 3; });
  refused({"rope_interleaved = 2 is not"}, [](auto& a) { a.rope_interleaved = 2; });
  refused({"args->struct_size = 8 ", std::to_string(sizeof(good))},
          [](auto& a) { a.struct_size = 8; });
  expect_failed(sagebwd_front(c, nullptr, nullptr), SAGEBWD_INVALID, {"args is null"});
  expect_failed(sagebwd_front(nullptr, &good, nullptr), SAGEBWD_INVALID, {"operation is null"});

  sagebwd_front_gradients_args gradients{.struct_size = sizeof(gradients), .of = &good};
  gradients.q = {.dx = tensor(0x500000), .dgain = at(0x2000), .gain_parts = at(0x700000)};
  gradients.k = {.dx = tensor(0x600000)};
  const auto refused_gradients =
      [&](const Parts& parts, const std::function<void(sagebwd_front_gradients_args&)>& change) {
        sagebwd_front_gradients_args args = gradients;
        change(args);
        expect_failed(sagebwd_front_gradients(c, &args, nullptr), SAGEBWD_INVALID, parts);
      };
  refused_gradients({"args->of is null"}, [](auto& a) { a.of = nullptr; });
  refused_gradients({"k.dx: the address is not"}, [&](auto& a) { a.k.dx.data = at(0x600008); });
  refused_gradients({"pass both or neither"}, [](auto& a) { a.q.gain_parts = nullptr; });
  refused_gradients({"q.dinv_rms: it is given, and inv_rms is not"},
                    [&](auto& a) { a.q.dinv_rms = at(0x9000); });
  refused_gradients({"args->struct_size = 0 "}, [](auto& a) { a.struct_size = 0; });
  sagebwd_front_args later = good;
  later.struct_size = 1 << 20;
  refused_gradients({"args->of->struct_size = 1048576 "}, [&](auto& a) { a.of = &later; });

  sagebwd_operation* packed = nullptr;
  ASSERT_EQ(sagebwd_create("d64 packed", 0, &packed), SAGEBWD_OK) << sagebwd_last_error();
  expect_failed(sagebwd_front(packed, &good, nullptr), SAGEBWD_INVALID, {"of packed sequences"});
  sagebwd_destroy(packed);
}

} // namespace
