//===- c_door_test.cpp - libsagebwd.so beside the C++ operation ------------===//
//
// The shared library has a copy of its own of everything; only c/sagebwd.h is between it and this.
//
//===----------------------------------------------------------------------===//
#include "runtime/version.h"
#include "tests/gpu/c_arguments.h"
#include "tests/gpu/listed.h"

#include <cmath>
#include <functional>
#include <thread>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using Outputs = reference::Outputs<float>;

/// An operation of both doors.
class CDoor : public OnGpu {
protected:
  ~CDoor() override { sagebwd_destroy(c); }
  void make(const AttentionSpec& spec) {
    attention.emplace(spec);
    const std::string line = to_string(attention->spec());
    ASSERT_EQ(sagebwd_create(line.c_str(), 0, &c), SAGEBWD_OK) << sagebwd_last_error();
    EXPECT_EQ(sagebwd_spec(c), line);
  }

  void expect_same_bits(const reference::Inputs& in, const RunOptions& options) {
    Faults expected_faults; // of tokens that do not count, which nobody writes
    const auto expected = run_on_gpu(*attention, 0, in, options, &expected_faults);
    Operands operands(*attention, in, options);
    const sagebwd_problem problem = for_c(operands.call);
    size_t forward = 0, backward = 0;
    ASSERT_EQ(sagebwd_workspace_bytes(c, &problem, &forward, &backward), SAGEBWD_OK);
    EXPECT_EQ(forward, operands.forward.workspace_bytes);
    EXPECT_GE(backward, operands.backward.workspace_bytes); // for gradients of any strides
    const sagebwd_forward_args f = for_c(operands.forward);
    const sagebwd_backward_args b = for_c(operands.backward);
    ASSERT_EQ(sagebwd_forward(c, &f, operands.forward.softmax_scale, operands.forward.workspace,
                              forward, nullptr),
              SAGEBWD_OK)
        << sagebwd_last_error();
    ASSERT_EQ(sagebwd_backward(c, &b, operands.backward.softmax_scale, operands.backward.workspace,
                               backward, nullptr),
              SAGEBWD_OK)
        << sagebwd_last_error();
    driver::synchronize();
    Faults faults;
    const auto found = operands.download(faults);
    EXPECT_EQ(faults, expected_faults);
    for (const auto part : {&Outputs::o, &Outputs::lse, &Outputs::dq, &Outputs::dk, &Outputs::dv})
      EXPECT_EQ(bits_of(found.*part), bits_of(expected.*part));
  }

  std::optional<Attention> attention;
  sagebwd_operation* c = nullptr;
};

TEST_F(CDoor, GivesTheSameBits) {
  make({.head_dim = 64, .causal = Causal::bottom_right});
  const Problem problem{2, 4, 2, 70, 90};
  auto in = reference::random_inputs(problem, 64, DType::bf16, 1, 1);
  in.dlse.assign(2 * 4 * 70, 0.5f);
  in.softmax_scale = -0.2f;
  expect_same_bits(in, {.layout = {.bshd = true, .padding = 8}});
}

TEST_F(CDoor, GivesTheSameBitsWithAGivenMeanOfTheKeys) {
  make({.head_dim = 64});
  EXPECT_EQ(sagebwd_usual_scale(c), 0.125f);
  auto in = reference::random_inputs({1, 2, 1, 70, 90}, 64, DType::bf16, 1, 4);
  in.softmax_scale = sagebwd_usual_scale(c);
  const auto with_their_own = run_on_gpu(*attention, 0, in, {});
  for (int i = 0; i < 64; ++i)
    in.k_mean.push_back(0.25f * std::cos(static_cast<float>(i)));
  expect_same_bits(in, {});
  const auto with_this = run_on_gpu(*attention, 0, in, {});
  EXPECT_NE(bits_of(with_this.dk), bits_of(with_their_own.dk)) << "the mean is not used";
}

TEST_F(CDoor, GivesTheSameBitsOfPackedSequences) {
  make({.head_dim = 72, .dtype = DType::fp16, .packed = true});
  const Problem problem{1, 2, 1, 150, 160};
  auto in = reference::random_inputs(problem, 72, DType::fp16, 1, 2);
  const auto narrow = reference::random_inputs(problem, 40, DType::fp16, 1, 2);
  in.v = narrow.v, in.dout = narrow.dout;
  expect_same_bits(in, {.layout = {.bshd = true},
                        .lengths = {{100, 90}, {50, 70}},
                        .used = {{80, 90}, {50, 33}},
                        .value_dim = 40});
}

TEST_F(CDoor, GivesTheSameBitsOfPaddedBatches) {
  make({.head_dim = 72, .packed = true});
  const auto in = reference::random_inputs({2, 2, 1, 50, 60}, 72, DType::bf16, 1, 3);
  expect_same_bits(in,
                   {.lengths = {{50, 60}, {50, 60}}, .used = {{40, 60}, {50, 7}}, .apart = true});
}

TEST_F(CDoor, GivesTheSameBitsOfListsOfBlocks) {
  make({.head_dim = 64, .causal = Causal::bottom_right, .sparse_q = 128, .sparse_kv = 64});
  const AttentionSpec& spec = attention->spec();
  auto in = listed_inputs(spec, {2, 4, 2, 300, 500}, 0.4);
  expect_same_bits(in, {});
  const auto sparse = run_on_gpu(*attention, 0, in, {});
  share_lists(spec, in); // of one head, for all of them: the strides are 0
  const std::vector<uint32_t> bits = packed_lists(spec, in);
  RunOptions shared;
  shared.row_bits.assign(bits.begin(), bits.begin() + bits.size() / (2 * 4));
  expect_same_bits(in, shared);
  EXPECT_NE(bits_of(run_on_gpu(*attention, 0, in, shared).o), bits_of(sparse.o));
  Operands operands(*attention, in);
  const auto refused = [&](const std::vector<std::string>& parts,
                           const std::function<void(sagebwd_lists&)>& change) {
    sagebwd_forward_args args = for_c(operands.forward);
    change(args.lists);
    expect_failed(sagebwd_forward(c, &args, operands.forward.softmax_scale,
                                  operands.forward.workspace, operands.forward.workspace_bytes,
                                  nullptr),
                  SAGEBWD_INVALID, parts);
  };
  refused({"lists"}, [](auto& lists) { lists.row_bits = nullptr; });
  refused({"lse and row_bits share memory", "writes lse"}, [&](auto& lists) {
    lists.row_bits = reinterpret_cast<const uint32_t*>(operands.forward.lse) + 300;
  });
  refused({"row_bits and the workspace share memory"}, [&](auto& lists) {
    lists.row_bits = static_cast<const uint32_t*>(operands.forward.workspace);
  });
  // A head has 3 lists (300 queries) of 1 word (8 blocks of keys).
  refused({"lists: the head stride is 2 words", "have 3:"}, [](auto& l) { l.stride_h = 2; });
  refused({"lists: the head stride is -3 words"}, [](auto& l) { l.stride_h = -3; });
  refused({"lists: the batch stride is -1 words"}, [](auto& l) { l.stride_b = -1; });
  refused({"lists: the batch stride is 4611686018427387904 words", "2^40"},
          [](auto& l) { l.stride_b = int64_t{1} << 62; });
}

/// A key of each three has the same number.
TEST_F(CDoor, GivesTheSameBitsOfIntervalsAndPacksThem) {
  make({.head_dim = 64, .causal = Causal::top_left, .intervals = 1});
  const Problem problem{2, 4, 2, 300, 270};
  auto in = reference::random_inputs(problem, 64, DType::bf16, 1, 6);
  for (int i = 0; i < problem.batch * problem.heads_kv * problem.seq_kv; ++i)
    in.intervals.push_back(100 + i % 3 * 70);
  expect_same_bits(in, {});
  Operands operands(*attention, in, {});
  Buffer bits(operands.row_bits->bytes());
  sagebwd_pack_args args{.struct_size = sizeof(sagebwd_pack_args),
                         .problem = for_c(problem),
                         .row_bits = bits.as<uint32_t>(),
                         .intervals = for_c(operands.forward.intervals)};
  ASSERT_EQ(sagebwd_pack_lists(c, &args, nullptr), SAGEBWD_OK) << sagebwd_last_error();
  driver::synchronize();
  EXPECT_EQ(bits.download<uint32_t>(), operands.row_bits->download<uint32_t>());
  sagebwd_forward_args forward = for_c(operands.forward);
  forward.intervals.numbers = static_cast<const int32_t*>(operands.forward.workspace);
  expect_failed(sagebwd_forward(c, &forward, operands.forward.softmax_scale,
                                operands.forward.workspace, operands.forward.workspace_bytes,
                                nullptr),
                SAGEBWD_INVALID, {"intervals and the workspace share memory"});
}

TEST_F(CDoor, PacksLists) {
  make({.head_dim = 64, .sparse_q = 128, .sparse_kv = 64});
  const Problem problem{2, 3, 1, 300, 64 * 33};
  const auto in = listed_inputs(attention->spec(), problem, 0.4);
  const std::vector<uint32_t> expected = packed_lists(attention->spec(), in);
  Buffer mask(in.listed.size()), bits(expected.size() * sizeof(uint32_t));
  mask.upload(in.listed);
  sagebwd_pack_args args{.struct_size = sizeof(sagebwd_pack_args),
                         .problem = for_c(problem),
                         .mask = mask.as(),
                         .row_bits = bits.as<uint32_t>()};
  ASSERT_EQ(sagebwd_pack_lists(c, &args, nullptr), SAGEBWD_OK) << sagebwd_last_error();
  driver::synchronize();
  EXPECT_EQ(bits.download<uint32_t>(), expected);
  args.mask = nullptr;
  expect_failed(sagebwd_pack_lists(c, &args, nullptr), SAGEBWD_INVALID, {"one of the two"});

  args.mask = mask.as();
  const auto refused = [&](const std::vector<std::string>& parts,
                           const std::function<void(sagebwd_pack_args&)>& change) {
    sagebwd_pack_args changed = args;
    change(changed);
    expect_failed(sagebwd_pack_lists(c, &changed, nullptr), SAGEBWD_INVALID, parts);
  };
  const auto* numbers = mask.as<const int32_t>();
  refused({"counts is given with a mask"}, [&](auto& a) { a.counts = numbers; });
  refused({"width is given with a mask"}, [](auto& a) { a.width = 5; });
  refused({"mask and row_bits share memory", "writes row_bits"},
          [&](auto& a) { a.row_bits = mask.as<uint32_t>(); });
  refused({"indices and row_bits share memory"}, [&](auto& a) {
    a.mask = nullptr, a.width = 3, a.indices = bits.as<const int32_t>() + 1;
  });
  refused({"counts and row_bits share memory"}, [&](auto& a) {
    a.mask = nullptr, a.width = 1, a.indices = numbers, a.counts = bits.as<const int32_t>();
  });
  refused({"2^60 bytes"}, [&](auto& a) {
    a.problem = {1 << 24, 65535, 1, 1 << 29, 64};
    a.mask = nullptr, a.width = 1 << 30, a.indices = numbers;
  });
  args.problem.heads_kv = 2; // 3 heads of queries: lists are theirs
  EXPECT_EQ(sagebwd_pack_lists(c, &args, nullptr), SAGEBWD_OK) << sagebwd_last_error();
  driver::synchronize();
}

TEST_F(CDoor, RefusalsAreStatusesWithMessages) {
  make({.head_dim = 64});
  Operands operands(*attention,
                    reference::random_inputs({1, 4, 2, 100, 90}, 64, DType::bf16, 1, 0));
  const sagebwd_forward_args good_forward = for_c(operands.forward);
  const sagebwd_backward_args good_backward = for_c(operands.backward);
  const float scale = operands.forward.softmax_scale;
  const size_t bytes = operands.forward.workspace_bytes;
  void* workspace = operands.forward.workspace;
  const auto forward = [&](const std::vector<std::string>& parts,
                           const std::function<void(sagebwd_forward_args&)>& change) {
    sagebwd_forward_args args = good_forward;
    change(args);
    expect_failed(sagebwd_forward(c, &args, scale, workspace, bytes, nullptr), SAGEBWD_INVALID,
                  parts);
  };
  forward({"v: the address is null"}, [](auto& a) { a.v.data = nullptr; });
  forward({"lse: the address is null"}, [](auto& a) { a.lse = nullptr; });
  forward({"k: ", "token stride is 68"}, [](auto& a) { a.k.stride_s = 68; });
  forward({"heads = 3", "key/value heads = 2"}, [](auto& a) { a.problem.heads = 3; });
  forward({"query length = 0"}, [](auto& a) { a.problem.seq_q = 0; });
  forward({"value_dim = 36"}, [](auto& a) { a.value_dim = 36; });
  forward({"value_dim = -8"}, [](auto& a) { a.value_dim = -8; });
  const int32_t first[] = {0, 100};
  forward({"packing.first_keys is given", "not packed"},
          [&](auto& a) { a.packing.first_keys = first; });
  forward({"q and out share memory"}, [](auto& a) { a.out = a.q; });
  forward({"lse and the workspace share memory"},
          [&](auto& a) { a.lse = static_cast<float*>(workspace); });
  forward({"k_mean and the workspace share memory"},
          [&](auto& a) { a.k_mean = static_cast<const float*>(workspace) + 64; });
  forward({"lse and k_mean share memory", "writes lse"},
          [](auto& a) { a.k_mean = a.lse - (2 * 64 - 1); }); // only its last number
  forward({"k_mean: the address is not a multiple of 4"}, [](auto& a) {
    a.k_mean = reinterpret_cast<const float*>(reinterpret_cast<uintptr_t>(a.lse) + 4098);
  });
  EXPECT_EQ(std::string(sagebwd_last_error()).find("k_mean"), 0u) << "as its member is called";
  forward({"packing.apart is given"}, [](auto& a) { a.packing.apart = 1; });
  forward({"packing.apart = 2 is not supported"}, [](auto& a) { a.packing.apart = 2; });
  uint32_t words[4] = {};
  forward({"lists of blocks are given"}, [&](auto& a) { a.lists.row_bits = words; });
  forward({"lists: the batch stride is 5,", "has no lists", "sparse_q"},
          [](auto& a) { a.lists.stride_b = 5; });
  forward({"lists: the head stride is -1,", "has no lists"},
          [](auto& a) { a.lists.stride_h = -1; });
  const std::string size = std::to_string(sizeof(sagebwd_forward_args));
  forward({"args->struct_size = 0 ", "it is " + size}, [](auto& a) { a.struct_size = 0; });
  forward({"args->struct_size = 18446744073709551615 "}, [](auto& a) { --(a.struct_size = 0); });

  const auto called = [&](const sagebwd_forward_args* args, float with_scale, void* with_workspace,
                          size_t with_bytes) {
    return sagebwd_forward(c, args, with_scale, with_workspace, with_bytes, nullptr);
  };
  expect_failed(called(nullptr, scale, workspace, bytes), SAGEBWD_INVALID, {"args is null"});
  expect_failed(called(&good_forward, NAN, workspace, bytes), SAGEBWD_INVALID,
                {"softmax_scale = "});
  expect_failed(called(&good_forward, scale, nullptr, bytes), SAGEBWD_INVALID, {"256 bytes"});
  expect_failed(called(&good_forward, scale, workspace, bytes - 1), SAGEBWD_INVALID,
                {std::to_string(bytes - 1), std::to_string(bytes), "are needed"});
  expect_failed(sagebwd_forward(nullptr, &good_forward, scale, workspace, bytes, nullptr),
                SAGEBWD_INVALID, {"operation is null"});

  const auto backward = [&](const std::vector<std::string>& parts,
                            const std::function<void(sagebwd_backward_args&)>& change) {
    sagebwd_backward_args args = good_backward;
    change(args);
    expect_failed(sagebwd_backward(c, &args, scale, operands.backward.workspace,
                                   operands.backward.workspace_bytes, nullptr),
                  SAGEBWD_INVALID, parts);
  };
  backward({"dout: ", "null"}, [](auto& a) { a.dout.data = nullptr; });
  backward({"dk: ", "token stride is 70"}, [](auto& a) { a.dk.stride_s = 70; });
  backward({"dk and dv share memory", "writes dk"}, [](auto& a) { a.dv = a.dk; });
  backward({"dout and dq share memory"}, [](auto& a) { a.dq = a.dout; });
  backward({"packing.lengths_q is given"}, [&](auto& a) { a.packing.lengths_q = first; });
  backward({"packing.apart = -1 is not supported"}, [](auto& a) { a.packing.apart = -1; });
  backward({"lists: the head stride is 64,"}, [](auto& a) { a.lists.stride_h = 64; });
  backward({"args->struct_size = 8 "}, [](auto& a) { a.struct_size = 8; });
  expect_failed(sagebwd_backward(c, nullptr, scale, workspace, bytes, nullptr), SAGEBWD_INVALID,
                {"args is null"});

  sagebwd_problem problem = for_c(operands.call);
  size_t forward_bytes = 1;
  expect_failed(sagebwd_workspace_bytes(c, nullptr, &forward_bytes, nullptr), SAGEBWD_INVALID,
                {"problem is null"});
  EXPECT_EQ(sagebwd_workspace_bytes(c, &problem, nullptr, nullptr), SAGEBWD_OK);
  problem.seq_kv = -1;
  expect_failed(sagebwd_workspace_bytes(c, &problem, &forward_bytes, nullptr), SAGEBWD_INVALID,
                {"key length = -1"});
  EXPECT_EQ(forward_bytes, 1u);
  expect_failed(sagebwd_warmup(nullptr, nullptr), SAGEBWD_INVALID, {"operation is null"});

  // Refused calls launched nothing: the outputs are as they were.
  driver::synchronize();
  for (const float x : operands.lse.download<float>())
    ASSERT_TRUE(std::isnan(x));
}

/// An argument of a later version asks for nothing if its caller leaves it at zero.
TEST_F(CDoor, TakesArgumentsOfALaterVersion) {
  make({.head_dim = 64});
  Operands operands(*attention, reference::random_inputs({1, 1, 1, 64, 64}, 64, DType::bf16, 1, 0));
  struct Later {
    sagebwd_forward_args now;
    int64_t more;
  } args{for_c(operands.forward), 0};
  args.now.struct_size = sizeof(args);
  const auto call = [&] {
    return sagebwd_forward(c, &args.now, operands.forward.softmax_scale, operands.forward.workspace,
                           operands.forward.workspace_bytes, nullptr);
  };
  EXPECT_EQ(call(), SAGEBWD_OK) << sagebwd_last_error();
  args.more = 1;
  expect_failed(call(), SAGEBWD_INVALID,
                {"args->struct_size = " + std::to_string(sizeof(args)),
                 "version " + std::string(version()) + " knows " +
                     std::to_string(sizeof(sagebwd_forward_args))});
  driver::synchronize();
}

TEST_F(CDoor, WarmsUp) {
  make({.head_dim = 64});
  const auto refused = [&](const std::vector<std::string>& parts, sagebwd_warmup_args args) {
    expect_failed(sagebwd_warmup(c, &args), SAGEBWD_INVALID, parts);
  };
  const size_t size = sizeof(sagebwd_warmup_args);
  expect_failed(sagebwd_warmup(c, nullptr), SAGEBWD_INVALID, {"args is null"});
  refused({"args->struct_size = 0 ", "it is " + std::to_string(size)}, {});
  refused({"args->struct_size = " + std::to_string(size - 1)}, {.struct_size = size - 1});
  refused({"backward = 2 is not supported"}, {.struct_size = size, .backward = 2});
  refused({"batch = 0"}, {.struct_size = size, .problem = {0, 4, 2, 100, 90}});
  refused({"heads = 3", "key/value heads = 2"},
          {.struct_size = size, .problem = {1, 3, 2, 100, 90}});
  const sagebwd_warmup_args by_default{.struct_size = size, .backward = 1};
  EXPECT_EQ(sagebwd_warmup(c, &by_default), SAGEBWD_OK) << sagebwd_last_error();
  const sagebwd_warmup_args of_size{
      .struct_size = size, .problem = {1, 4, 2, 100, 90}, .backward = 1};
  EXPECT_EQ(sagebwd_warmup(c, &of_size), SAGEBWD_OK) << sagebwd_last_error();
}

TEST_F(CDoor, UnknownGpusAreNamed) {
  sagebwd_operation* none = nullptr;
  const std::string line = to_string(*resolved({.head_dim = 64}));
  const sagebwd_status status = sagebwd_create(line.c_str(), 1000, &none);
  EXPECT_NE(status, SAGEBWD_OK);
  expect_failed(status, status, {"1000"});
  EXPECT_EQ(none, nullptr);
}

// These need no GPU.

TEST(CDoorAlone, SpecsAreChecked) {
  int something = 0;
  auto* operation = reinterpret_cast<sagebwd_operation*>(&something);
  const auto refused = [&](const char* spec, const std::vector<std::string>& parts) {
    expect_failed(sagebwd_create(spec, 0, &operation), SAGEBWD_INVALID, parts);
    EXPECT_EQ(operation, nullptr);
  };
  refused(nullptr, {"spec is null"});
  refused("", {"cannot read spec ''", "it is empty. A spec is a line as it is printed"});
  refused("d64 bf17", {"cannot read spec 'd64 bf17'"});
  std::string line = to_string(*resolved({.head_dim = 64}));
  refused(line.substr(0, line.find(" numerics")).c_str(), {"the version of its numerics"});
  refused((line + "1").c_str(),
          {"numerics = " + std::to_string(kNumerics) + "1 is not what this version computes"});
  line.replace(0, 3, "d90");
  refused(line.c_str(), {"head dimension 90 is not built", "32 to 512"});
  expect_failed(sagebwd_create(line.c_str(), 0, nullptr), SAGEBWD_INVALID, {"operation is null"});
  EXPECT_EQ(sagebwd_spec(nullptr), nullptr);
  EXPECT_EQ(sagebwd_usual_scale(nullptr), 0);
  sagebwd_destroy(nullptr);
}

TEST(CDoorAlone, ErrorsAreOfTheirThread) {
  EXPECT_EQ(sagebwd_warmup(nullptr, nullptr), SAGEBWD_INVALID);
  const std::string here = sagebwd_last_error();
  std::string at_first, there;
  std::thread([&] {
    at_first = sagebwd_last_error();
    sagebwd_operation* operation;
    sagebwd_create("d64", 0, &operation);
    there = sagebwd_last_error();
  }).join();
  EXPECT_EQ(at_first, "");
  EXPECT_NE(there, here);
  EXPECT_EQ(sagebwd_last_error(), here);
}

TEST(CDoorAlone, VersionIsTheLibrarys) { EXPECT_STREQ(sagebwd_version(), version()); }

} // namespace
