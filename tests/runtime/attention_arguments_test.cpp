//===- attention_arguments_test.cpp - What a pass refuses, and launches -----===//
//
// On a fake driver (fake_libcuda.c), in a child process that is this executable again.
//
//===----------------------------------------------------------------------===//

#include "runtime/attention.h"
#include "runtime/nvrtc/nvrtc.h"
#include "tests/runtime/again.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <thread>
#include <vector>

using namespace sagebwd;
using test::ScopedVariable;

namespace {

constexpr uint64_t kSomewhere = 1 << 20; // the fake driver's kernels look at nothing
constexpr uint64_t kApart = 1 << 18;     // between what is read and what is written

AttentionSpec spec() {
  AttentionSpec s;
  s.head_dim = 64;
  return s;
}

ForwardArgs arguments(uint64_t address = kSomewhere) {
  ForwardArgs args;
  args.problem = {1, 2, 1, 300, 200};
  args.q = args.k = args.v = {reinterpret_cast<void*>(address), 1 << 16, 1 << 15, 64};
  args.out = {reinterpret_cast<void*>(address + kApart), 1 << 16, 1 << 15, 64};
  args.lse = reinterpret_cast<float*>(address + 2 * kApart);
  args.softmax_scale = 0.125f;
  args.workspace = reinterpret_cast<void*>(address + 3 * kApart);
  args.workspace_bytes = 1 << 24;
  return args;
}

void say(const char* what, const std::function<void()>& action) {
  try {
    action();
    std::printf("%s: done\n", what);
  } catch (const SpecError& error) {
    std::printf("%s: SpecError: %s\n", what, error.what());
  }
}

void refuse() {
  const Attention attention(spec());
  for (float scale : {1e-20f, -1e-20f, 0.0f, 9e-21f, 1e-44f, -9e-21f, INFINITY, NAN})
    say("scale", [&] {
      ForwardArgs args = arguments();
      args.softmax_scale = scale;
      attention.prepare(args);
    });
  for (int value_dim : {32, 36, 136})
    say("value", [&] {
      ForwardArgs args = arguments();
      args.value_dim = value_dim;
      attention.prepare(args);
    });
  say("stride", [&] {
    ForwardArgs args = arguments();
    args.k.stride_s = 68;
    attention.prepare(args);
  });
  // Tensor maps of Hopper have no negative strides, so that only some kernels could read them.
  for (Tensor ForwardArgs::*tensor :
       {&ForwardArgs::q, &ForwardArgs::k, &ForwardArgs::v, &ForwardArgs::out})
    for (int64_t Tensor::*stride : {&Tensor::stride_s, &Tensor::stride_h})
      say("turned", [&] {
        ForwardArgs args = arguments();
        if (tensor != &ForwardArgs::q && tensor != &ForwardArgs::out)
          args.problem.heads_kv = 2;
        args.*tensor.*stride = -(args.*tensor.*stride);
        attention.prepare(args);
      });
  // Sizes of these tensors in bytes do not fit 64 bits.
  for (Tensor ForwardArgs::*tensor : {&ForwardArgs::q, &ForwardArgs::v, &ForwardArgs::out})
    say("far", [&] {
      ForwardArgs args = arguments();
      (args.*tensor).stride_s = int64_t{1} << 62;
      attention.prepare(args);
    });
  say("near", [&] {
    ForwardArgs args = arguments();
    args.q.stride_h = args.k.stride_h = int64_t{1} << 40; // k has one head: ignored
    args.v.stride_b = int64_t{1} << 62;
    attention.prepare(args);
  });
  for (int64_t Lists::*stride : {&Lists::stride_b, &Lists::stride_h})
    say("no lists", [&] {
      ForwardArgs args = arguments();
      args.lists.*stride = 8;
      attention.prepare(args);
    });
  say("narrow", [&] {
    ForwardArgs args = arguments();
    args.q.stride_s = args.k.stride_s = args.v.stride_s = 8; // is only read
    args.out.stride_s = 56;
    attention.prepare(args);
  });
  AttentionSpec padded = spec();
  padded.head_dim = 48;
  const Attention of_padded(padded);
  for (int64_t stride : {32, 24})
    say("value channels", [&] {
      ForwardArgs args = arguments();
      args.value_dim = 32;
      args.out.stride_s = stride;
      of_padded.prepare(args);
    });
  AttentionSpec sparse = spec();
  sparse.sparse_q = sparse.sparse_kv = 64;
  const Attention of_lists(sparse);
  for (int shifted : {0, 1, 2})
    say("lists", [&] {
      const auto address = [&](int which) { return kSomewhere + (which == shifted ? 2 : 0); };
      ListsToPack lists;
      lists.problem = arguments().problem;
      lists.width = 1;
      lists.indices = reinterpret_cast<const int32_t*>(address(0));
      lists.counts = reinterpret_cast<const int32_t*>(address(1));
      lists.row_bits = reinterpret_cast<uint32_t*>(address(2));
      of_lists.pack_lists(lists);
    });
  AttentionSpec between = spec();
  between.intervals = 2;
  const Attention of_intervals(between);
  const auto numbers = [](uint64_t address) { return reinterpret_cast<const int32_t*>(address); };
  for (const auto& [address, step] :
       {std::pair{0, 0}, {4, 0}, {8, 3}, {8, -2}}) // null, misaligned, and strides that cannot be
    say("intervals", [&] {
      ListsToPack lists;
      lists.problem = arguments().problem;
      lists.problem.batch = 2;
      lists.intervals = {address ? numbers(kSomewhere + address) : nullptr, step, 0};
      lists.row_bits = reinterpret_cast<uint32_t*>(kSomewhere);
      of_intervals.pack_lists(lists);
    });
  say("intervals of none", [&] {
    ForwardArgs args = arguments();
    args.intervals = {numbers(kSomewhere), 0, 0};
    Attention(spec()).forward(args);
  });
  say("intervals of lists", [&] {
    ListsToPack lists;
    lists.problem = arguments().problem;
    lists.mask = numbers(kSomewhere);
    lists.intervals = {numbers(kSomewhere), 0, 0};
    lists.row_bits = reinterpret_cast<uint32_t*>(kSomewhere);
    of_lists.pack_lists(lists);
  });
  const PreparedPass pass = attention.prepare(arguments(0));
  say("bytes", [&] {
    if (pass.workspace_bytes() != attention.forward_workspace_bytes(arguments().problem))
      throw SpecError("they differ");
  });
  const auto run = [&](const char* what, std::vector<uint64_t> addresses, uint64_t workspace) {
    say(what, [&] { pass.run(addresses, workspace, nullptr); });
  };
  const uint64_t at = kSomewhere;
  run("fewer", {at, at, at, at, at}, at);
  run("null", {at, at, 0, at, at, 0}, at);
  run("shifted", {at, at, at, at + 8, at, 0}, at);
  run("rows", {at, at, at, at, 0, 0}, at);
  run("workspace", {at, at, at, at, at, 0}, at + 128);
  AttentionSpec unsmoothed = spec();
  unsmoothed.smooth_k = false;
  say("mean", [&] {
    ForwardArgs args = arguments();
    args.k_mean = reinterpret_cast<const float*>(at);
    Attention(unsmoothed).forward(args);
  });
  say("shared by q", [&] {
    ForwardArgs args = arguments();
    args.out = args.q;
    Attention(spec()).forward(args);
  });
  say("shared by lse", [&] {
    ForwardArgs args = arguments();
    args.lse = static_cast<float*>(args.workspace) + 600;
    Attention(spec()).forward(args);
  });
  AttentionSpec packed = spec();
  packed.packed = true;
  Attention of_packed(packed);
  for (int64_t shift : {0, 2}) // of 2 sequences: first_keys has 3 numbers
    say("shared by packing", [&] {
      ForwardArgs args = arguments();
      args.problem.batch = 2;
      args.packing.first_queries = args.packing.first_keys = reinterpret_cast<int32_t*>(at / 2);
      (shift == 0 ? args.packing.lengths_q : args.packing.first_keys) =
          reinterpret_cast<const int32_t*>(args.lse) - shift;
      of_packed.forward(args);
    });
  say("shared by dk", [&] {
    BackwardArgs args;
    const ForwardArgs of = arguments();
    args.problem = of.problem;
    args.q = args.k = args.v = of.q, args.out = args.dout = of.out, args.lse = of.lse;
    args.dq = args.dk = args.dv = of.q;
    uint64_t at = 8 * kSomewhere;
    for (Tensor* gradient : {&args.dq, &args.dk, &args.dv})
      gradient->data = reinterpret_cast<void*>(at += kApart);
    args.dv.data = static_cast<char*>(args.dk.data) + 64 * 199 * 2; // dk's last token
    args.softmax_scale = 1;
    args.workspace = of.workspace, args.workspace_bytes = of.workspace_bytes;
    Attention(spec()).backward(args);
  });
}

/// A prepared pass at two places, each beside a call that says all of it.
void launch() {
  Attention attention(spec());
  const PreparedPass pass = attention.prepare(arguments(0));
  attention.warmup(false, arguments().problem);
  for (uint64_t at : {kSomewhere, 5 * kSomewhere}) {
    say("whole", [&] { attention.forward(arguments(at)); });
    say("prepared", [&] {
      pass.run(std::vector<uint64_t>{at, at, at, at + kApart, at + 2 * kApart, 0}, at + 3 * kApart,
               nullptr);
    });
  }
}

class AttentionArguments : public testing::Test {
protected:
  static std::string run(const char* scenario) {
    const test::TempDirectory folder;
    test::compile_fake_driver(folder.path());
    ScopedVariable path("LD_LIBRARY_PATH", folder.path());
    ScopedVariable cache("SAGEBWD_CACHE_DIR", folder / "cache"), mode("SAGEBWD_TUNE", "off");
    ScopedVariable major("FAKE_MAJOR", "8"), minor("FAKE_MINOR", "0"), sms("FAKE_SMS", "108");
    return test::report_of_child("AttentionArguments.AreRefused", scenario);
  }
};

TEST_F(AttentionArguments, AreRefused) {
  if (const char* scenario = test::child_task()) {
    test::report(std::string(scenario) == "launch" ? launch : refuse);
    return;
  }
  const std::string output = run("refuse");
  for (const char* part :
       {"scale: done",
        "scale: SpecError: softmax_scale = 9e-21 is not supported: it must be "
        "finite, and 0 or at least 1e-20 in magnitude",
        "value: SpecError: value_dim = 32 with head_dim = 64",
        "pad v with zero channels",
        "value_dim = 36 ",
        "value_dim = 136 ",
        "pad q and k with zero channels",
        "softmax_scale = 9.80909e-45",
        "softmax_scale = -9e-21 ",
        "softmax_scale = inf",
        "softmax_scale = ",
        "stride: SpecError: k: the token stride is 68",
        "turned: SpecError: q: the token stride is -64, and strides are 0 or more",
        "turned: SpecError: q: the head stride is -32768",
        "turned: SpecError: k: the token stride is -64",
        "turned: SpecError: k: the head stride is -32768",
        "turned: SpecError: v: the token stride is -64",
        "turned: SpecError: v: the head stride is -32768",
        "turned: SpecError: out: the token stride is -64",
        "turned: SpecError: out: the head stride is -32768",
        "far: SpecError: q: the token stride is 4611686018427387904, and the size there is 300",
        "far: SpecError: v: the token stride is 4611686018427387904",
        "far: SpecError: out: the token stride is 4611686018427387904",
        "near: done",
        "no lists: SpecError: lists: the batch stride is 8, and the spec has no lists",
        "no lists: SpecError: lists: the head stride is 8, and the spec has no lists",
        "narrow: SpecError: out: the token stride is 56, and each token has 64 channels that are "
        "written: pass memory in which every element has a place",
        "value channels: done",
        "value channels: SpecError: out: the token stride is 24, and each token has 32 channels",
        "lists: SpecError: indices: the address is not a multiple of 4 bytes",
        "lists: SpecError: counts: the address is not a multiple of 4 bytes",
        "lists: SpecError: row_bits: the address is not a multiple of 4 bytes",
        "intervals: SpecError: lists of a spec with intervals are packed from these",
        "intervals: SpecError: intervals: the address is not a multiple of the 8 bytes",
        "intervals: SpecError: intervals: the batch stride is 3: strides are 0",
        "intervals: SpecError: intervals: the batch stride is -2: strides are 0",
        "intervals of none: SpecError: intervals are given, and the spec has none",
        "intervals of lists: SpecError: intervals are given, and the spec has none",
        "bytes: done",
        "fewer: SpecError: this pass takes 6 tensors, given are 5",
        "null: SpecError: v: the address is null; pass device memory",
        "shifted: SpecError: out: the address is not a multiple of 16",
        "rows: SpecError: lse: the address is null; pass (batch, heads, query) floats",
        "workspace: SpecError: the workspace must be device memory aligned to 256",
        "mean: SpecError: k_mean is given and smooth_k is off",
        "shared by q: SpecError: q and out share memory, and the pass writes out",
        "shared by lse: SpecError: lse and the workspace share memory",
        "shared by packing: SpecError: lse and lengths_q share memory, and the pass writes lse",
        "shared by packing: SpecError: lse and first_keys share memory",
        "shared by dk: SpecError: dk and dv share memory, and the pass writes dk"})
    EXPECT_NE(output.find(part), std::string::npos) << part << " is not in:\n" << output;
  size_t accepted = 0;
  for (size_t at = 0; (at = output.find("scale: done", at)) != std::string::npos; ++at)
    ++accepted;
  EXPECT_EQ(accepted, 3u) << output;
  EXPECT_EQ(output.find("launch"), std::string::npos) << output;
}

TEST_F(AttentionArguments, APreparedPassLaunchesWhatACallDoes) {
  try {
    Nvrtc::instance();
  } catch (const LibraryError& error) {
    GTEST_SKIP() << "no NVRTC: " << error.what();
  }
  const std::string output = run("launch");
  std::vector<std::string> launched; // of each call
  std::string lines;
  for (size_t at = output.find("push"), end; (end = output.find('\n', at)) != std::string::npos;
       at = end + 1) {
    const std::string line = output.substr(at, end - at);
    if (line == "whole: done" || line == "prepared: done") {
      launched.push_back(lines.substr(lines.rfind("cuda: push")));
      lines.clear();
    } else {
      lines += line + "\n";
    }
  }
  ASSERT_EQ(launched.size(), 4u) << output;
  EXPECT_NE(launched[0].find("param " + std::to_string(kSomewhere)), std::string::npos) << output;
  EXPECT_EQ(launched[0], launched[1]);
  EXPECT_EQ(launched[2], launched[3]);
  EXPECT_NE(launched[0], launched[2]);
}

} // namespace
