//===- attention_tiles_scenarios.cpp - What runs on a GPU that is not there ===//

#include "tests/runtime/attention_tiles_scenarios.h"
#include "generator/choice.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/tuner/tuner.h"

#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

namespace sagebwd::test {
namespace {

const Problem kShort = {1, 1, 1, 512, 512}, kLong = {1, 32, 32, 8192, 8192};

/// Prints what an action gives, or the error it ends with.
void tell(const char* what, const std::function<std::string()>& action) {
  std::string result;
  try {
    result = action();
  } catch (const SpecError& error) {
    result = std::string("SpecError: ") + error.what();
  } catch (const TuneError& error) {
    result = std::string("TuneError: ") + error.what();
  } catch (const DriverError& error) {
    result = std::string("DriverError: ") + error.what();
  }
  std::printf("%s: %s\n", what, result.c_str());
}

/// Keeps a record by which a tile has won.
void keep(KernelKind kind, const Problem& problem, const std::string& tile) {
  const Gpu gpu = gpu_of(0);
  TuningRecord record;
  record.key =
      record_key(kind, resolved(tiles_spec()), gpu, bucket_of(kind, problem, gpu.sm_count));
  record.tile = record.default_tile = tile;
  user_records().keep(record);
}

void show_tiles() {
  Attention attention(tiles_spec());
  std::printf("arch: %s\n", std::string(attention.arch().name).c_str());
  for (KernelKind kind : {KernelKind::forward, KernelKind::backward_dq, KernelKind::backward_dkv})
    tell(std::string(to_string(kind)).c_str(),
         [&] { return to_string(attention.tile(kind, kLong)); });
}

void use_records() {
  Attention attention(tiles_spec()), given(tiles_spec(), 0, Tiles{});
  const auto forward = [](Attention& a, const Problem& p) {
    return [&a, p] { return to_string(a.tile(KernelKind::forward, p)); };
  };
  tell("before", forward(attention, kLong));
  keep(KernelKind::forward, kLong, "mma 128x128 w8 s1 b1");
  tell("after", forward(attention, kLong));
  tell("same bucket", forward(attention, {4, 32, 8, 5000, 4500}));
  tell("other bucket", forward(attention, kShort));
  tell("given tiles", forward(given, kLong));
  tell("other kernel", [&] { return to_string(attention.tile(KernelKind::backward_dq, kLong)); });
  keep(KernelKind::forward, kLong, "mma 64x128 w4 s2 b2");
  tell("tuned again", forward(attention, kLong));
}

/// Arguments that the fake driver's kernels do not look at.
struct Arguments {
  Arguments(const Attention& attention, const Problem& problem) {
    const auto place = [](uint64_t number) { return reinterpret_cast<void*>(number << 40); };
    forward.problem = problem;
    forward.q = forward.k = forward.v = {place(1), 64, 64, 64};
    forward.out = {place(2), 64, 64, 64};
    forward.lse = static_cast<float*>(place(3));
    forward.softmax_scale = 1;
    forward.workspace = place(4);
    forward.workspace_bytes = attention.forward_workspace_bytes(problem);
  }
  ForwardArgs forward;
};

/// Calls of many sizes while records come and go.
void call_from_many_threads() {
  Attention attention(tiles_spec());
  attention.warmup(false);
  const char* const kTiles[] = {"mma 128x128 w8 s1 b1", "mma 64x128 w4 s2 b2"};
  for (const char* tile : kTiles) { // compiled before the race
    keep(KernelKind::forward, kShort, tile);
    attention.warmup(false, kShort);
  }
  std::atomic<int> calls{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&, i] {
      Arguments args(attention, {1, 1, 1, int64_t{256} << (i % 4), 512});
      for (int call = 0; call < 200; ++call, ++calls)
        attention.forward(args.forward);
    });
  for (int i = 0; i < 40; ++i)
    keep(KernelKind::forward, {1, 1, 1, int64_t{256} << (i % 4), 512}, kTiles[i % 2]);
  for (std::thread& thread : threads)
    thread.join();
  std::printf("calls: %d\n", calls.load());
}

/// The grid's first extent, which the fake driver writes down, tells 64 queries a block from 128.
void launch_tiles() {
  Attention attention(tiles_spec());
  Arguments args(attention, kShort);
  const auto forward = [&](void* stream) {
    return [&, stream] {
      args.forward.stream = stream;
      attention.forward(args.forward);
      return std::string("launched");
    };
  };
  int captured = 0; // to the fake driver every stream but the null stream is being captured
  tell("capture, nothing loaded", forward(&captured));
  attention.warmup(false);
  tell("capture, default", forward(&captured));
  keep(KernelKind::forward, kShort, "mma 128x128 w8 s1 b1");
  tell("capture, tuned but not loaded", forward(&captured));
  attention.warmup(false, kShort);
  tell("capture, tuned", forward(&captured));
  tell("tuned", forward(nullptr));
}

/// The kernels that write lists, in a capture behind a warm-up for calls of one size.
void pack_in_a_capture() {
  AttentionSpec sparse = tiles_spec();
  sparse.head_dim = 48; // whose warm-up has no kernels of the linear branch
  sparse.sparse_q = 128, sparse.sparse_kv = 64;
  Attention attention(sparse);
  int captured = 0;
  ListsToPack lists;
  lists.problem = kShort;
  lists.row_bits = reinterpret_cast<uint32_t*>(1 << 20);
  lists.stream = &captured;
  const auto pack = [&] {
    attention.pack_lists(lists);
    return std::string("launched");
  };
  lists.mask = reinterpret_cast<const void*>(1 << 21);
  tell("mask, cold", pack);
  attention.warmup(false, kShort);
  tell("mask, warm", pack);
  lists.indices = reinterpret_cast<const int32_t*>(std::exchange(lists.mask, nullptr));
  lists.width = 1;
  tell("indices, warm", pack);
}

/// A record from a machine whose compiler can do more: here the tile spills.
void launch_what_cannot_be_built() {
  Attention attention(tiles_spec());
  Arguments args(attention, kShort);
  keep(KernelKind::forward, kShort, "mma 64x128 w4 s1 b4");
  tell("call", [&] {
    attention.forward(args.forward);
    return std::string("launched");
  });
}

/// A record that comes while the kernels of a first call are being compiled.
void tune_during_the_first_call() {
  Attention attention(tiles_spec());
  Arguments args(attention, kShort);
  std::thread other([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    keep(KernelKind::forward, kShort, "mma 128x128 w8 s1 b1");
  });
  attention.forward(args.forward);
  other.join();
  tell("second", [&] {
    attention.forward(args.forward);
    return std::string("launched");
  });
}

/// One of two buckets that have been launched changes.
void tune_after_the_first_call() {
  Attention attention(tiles_spec());
  Arguments args(attention, kShort), longer(attention, {1, 1, 1, 1024, 512});
  const auto forward = [&](Arguments& a) {
    return [&] {
      attention.forward(a.forward);
      return std::string("launched");
    };
  };
  tell("first", forward(args));
  tell("first of another bucket", forward(longer));
  keep(KernelKind::forward, kShort, "mma 128x128 w8 s1 b1");
  tell("second", forward(args));
  tell("second of another bucket", forward(longer));
}

/// Without `deterministic`: a backward in one kernel, where it is the default.
void show_fused() {
  AttentionSpec free = tiles_spec();
  free.precision = Precision::gradients16, free.deterministic = false;
  const Gpu gpu = gpu_of(0);
  TuningRecord record; // of the split one
  record.key = record_key(KernelKind::backward_dkv, resolved(free), gpu,
                          bucket_of(KernelKind::backward_dkv, kLong, gpu.sm_count));
  record.tile = record.default_tile = "mma 64x128 w8 s1 b1";
  user_records().keep(record);
  Attention attention(free),
      split(free, 0, Tiles{{KernelKind::backward_dkv, parse_tile(record.tile)}});
  for (KernelKind kind : {KernelKind::forward, KernelKind::backward, KernelKind::backward_dkv})
    tell(std::string(to_string(kind)).c_str(),
         [&] { return to_string(attention.tile(kind, kLong)); });
  tell("given", [&] { return to_string(split.tile(KernelKind::backward_dkv, kLong)); });
  const size_t more =
      attention.backward_workspace_bytes(kLong) - split.backward_workspace_bytes(kLong);
  tell("sums of dQ, bytes a value", [&] { return std::to_string(more / (32 * 8192 * 64)); });
}

/// Calls so short that two kernels form the gradients, and others.
void show_by_length() {
  Attention attention(tiles_spec());
  AttentionSpec as_split = tiles_spec();
  as_split.gradient_kernels = Backward::split;
  Attention split(as_split);
  const auto gradients = [&](const Problem& problem) {
    for (KernelKind kind : {KernelKind::backward, KernelKind::backward_dkv})
      tell(std::string(to_string(kind)).c_str(),
           [&] { return to_string(attention.tile(kind, problem)); });
    tell("as split", [&] {
      return std::to_string(attention.backward_workspace_bytes(problem) ==
                            split.backward_workspace_bytes(problem));
    });
  };
  gradients(kLong);
  gradients(kShort);
  const auto others =
      tiles_worth_trying(KernelKind::backward_dkv, attention.spec(), attention.arch());
  keep(KernelKind::backward_dkv, kShort, to_string(others.at(1)));
  tell("has its record's tile", [&] {
    return std::to_string(attention.tile(KernelKind::backward_dkv, kShort) == others[1]);
  });
}

size_t kernels_of_both() {
  return Operation(resolved(tiles_spec()), find_arch("sm_80")).distinct_kernels().size();
}

/// Kernels that no pass launches are built with others by warmup() alone.
void build_beside(const Attention& attention) {
  build_all(kernels_beside(attention.spec(), attention.arch()));
}

void build_ahead() {
  Attention attention(tiles_spec());
  const auto compiled = [] { return user_store().counters().compiles.load(); };
  attention.build_ahead({0, 1, 1, 1, 1}, nullptr); // no problem: whoever runs it says so
  tell("of none", [&] { return std::to_string(compiled()); });
  build_beside(attention);
  attention.build_ahead(kLong, nullptr);
  const auto before = std::chrono::steady_clock::now();
  attention.warmup(false, kLong);
  const auto spent = std::chrono::steady_clock::now() - before;
  tell("the forward",
       [&] { return spent < std::chrono::milliseconds(50) ? "is built" : "is not"; });
  for (int i = 0; i < 1200 && compiled() < kernels_of_both(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50)); // nobody asks for the backward
  tell("of both passes", [&] { return std::to_string(compiled()); });
  attention.warmup(true, kLong);
  tell("and then", [&] { return std::to_string(compiled()); });
}

/// The process ends while the backward's kernels are being compiled.
void end_during_build() {
  Attention attention(tiles_spec());
  build_beside(attention);
  attention.build_ahead(kLong, nullptr);
  tell("unfinished", [] {
    return user_store().counters().compiles.load() < kernels_of_both() ? "some" : "none";
  });
}

} // namespace

const std::map<std::string, std::function<void()>>& tiles_scenarios() {
  static const std::map<std::string, std::function<void()>> map = {
      {"tiles", show_tiles},
      {"ahead", build_ahead},
      {"ends", end_during_build},
      {"fused", show_fused},
      {"lengths", show_by_length},
      {"records", use_records},
      {"launch", launch_tiles},
      {"threads", call_from_many_threads},
      {"lists", pack_in_a_capture},
      {"spills", launch_what_cannot_be_built},
      {"late record", tune_during_the_first_call},
      {"changed record", tune_after_the_first_call},
      {"constructor",
       [] { tell("constructor", [] { return to_string(Attention(tiles_spec()).spec()); }); }}};
  return map;
}
} // namespace sagebwd::test
