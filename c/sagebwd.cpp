//===- sagebwd.cpp - The operation for C ----------------------------------===//
//
// This file decides nothing. It turns every exception into a status and a message.
//
//===----------------------------------------------------------------------===//
#pragma GCC visibility push(default)
#include "c/sagebwd.h"
#pragma GCC visibility pop

#include "runtime/attention.h"
#include "runtime/front_end.h"
#include "runtime/nvrtc/library.h"
#include "runtime/version.h"

#include <algorithm>
#include <cmath>
#include <cstring>

using namespace sagebwd;

struct sagebwd_operation {
  sagebwd_operation(const char* text, int device)
      : attention(parse_spec(text), device), spec(to_string(attention.spec())) {}

  Attention attention;
  std::string spec;
};

namespace {

thread_local std::string last_error;

sagebwd_status failed(sagebwd_status status, const char* what,
                      const std::string& log = {}) noexcept {
  try {
    last_error = what;
    if (!log.empty())
      last_error += "\n" + log;
  } catch (...) { // no memory for the message
    last_error.clear();
  }
  return status;
}

template <typename Call> sagebwd_status guarded(const Call& call) noexcept {
  try {
    call();
    return SAGEBWD_OK;
  } catch (const std::invalid_argument& error) { // a spec, an argument, a variable's value
    return failed(SAGEBWD_INVALID, error.what());
  } catch (const LibraryError& error) {
    return failed(SAGEBWD_NO_LIBRARY, error.what());
  } catch (const OfflineError& error) {
    return failed(SAGEBWD_OFFLINE, error.what());
  } catch (const CompileError& error) {
    return failed(SAGEBWD_COMPILE, error.what(), error.log);
  } catch (const DriverError& error) {
    return failed(SAGEBWD_DRIVER, error.what());
  } catch (const std::exception& error) {
    return failed(SAGEBWD_FAILED, error.what());
  } catch (...) {
    return failed(SAGEBWD_FAILED, "an exception of unknown type");
  }
}

template <typename T> T& given(T* pointer, const char* name) {
  if (!pointer)
    throw SpecError(std::string(name) + " is null");
  return *pointer;
}

/// A larger size means that the caller did not set it.
constexpr size_t kMostBytes = 4096;

/// The struct of this version. If the caller's struct is longer (a later version), the further
/// members must be zeros.
template <typename Args> Args arguments(const Args* pointer, const std::string& name = "args") {
  const size_t size = given(pointer, name.c_str()).struct_size;
  const char* bytes = reinterpret_cast<const char*>(pointer);
  if (size < sizeof(Args) || size > kMostBytes)
    throw SpecError(name + "->struct_size = " + std::to_string(size) + " is not supported: it is " +
                    std::to_string(sizeof(Args)) + ", the struct's sizeof");
  const bool asks_for_more =
      std::any_of(bytes + sizeof(Args), bytes + size, [](char byte) { return byte != 0; });
  if (asks_for_more)
    throw SpecError(name + "->struct_size = " + std::to_string(size) + ", of which version " +
                    version() + " knows " + std::to_string(sizeof(Args)) +
                    ", and members behind them are not zero: link a later libsagebwd, leave them "
                    "at zero, or pass the struct of this function");
  return *pointer;
}

Problem problem_of(const sagebwd_problem& p) {
  return {p.batch, p.heads, p.heads_kv, p.seq_q, p.seq_kv};
}
Tensor tensor_of(const sagebwd_tensor& t) { return {t.data, t.stride_b, t.stride_h, t.stride_s}; }
Packing packing_of(const sagebwd_packing& p) {
  if (p.apart != 0 && p.apart != 1)
    throw SpecError("packing.apart = " + std::to_string(p.apart) +
                    " is not supported: it is 0 for sequences that lie one behind the other, and 1 "
                    "for those of a batch");
  return {p.first_queries, p.first_keys, p.lengths_q, p.lengths_kv, p.apart != 0};
}

Lists lists_of(const sagebwd_lists& l) { return {l.row_bits, l.stride_b, l.stride_h}; }
Intervals intervals_of(const sagebwd_intervals& i) { return {i.numbers, i.stride_b, i.stride_h}; }
static_assert(SAGEBWD_TABLES == kMostTables);
Tables tables_of(const sagebwd_table (&given)[SAGEBWD_TABLES]) {
  Tables tables;
  for (size_t i = 0; i < tables.size(); ++i)
    tables[i] = {given[i].numbers, given[i].rows, given[i].columns};
  return tables;
}
Shares shares_of(const sagebwd_shares& s) {
  if (s.of_rest != 0 && s.of_rest != 1)
    throw SpecError("shares.of_rest = " + std::to_string(s.of_rest) +
                    " is not supported: it is 0 where alpha is the share, and 1 where it is rest");
  if (s.keeps_sums != 0 && s.keeps_sums != 1)
    throw SpecError("shares.keeps_sums = " + std::to_string(s.keeps_sums) +
                    " is not supported: it is 0, or 1 where the backward reads the forward's sums");
  return {s.alpha, s.stride_b, s.stride_h, s.stride_s, s.tokens, s.of_rest != 0, s.keeps_sums != 0};
}

bool yes_or_no(int value, const std::string& name, const char* meanings) {
  if (value != 0 && value != 1)
    throw SpecError(name + " = " + std::to_string(value) + " is not supported: it is " + meanings);
  return value != 0;
}
FrontSide front_side_of(const sagebwd_front_side& s, const std::string& name) {
  const char* of_heads = "1 if each head has its own, and 0 if heads share it";
  return {.x = tensor_of(s.x),
          .y = tensor_of(s.y),
          .normed = yes_or_no(s.normed, name + ".normed", "1 for a norm, and 0 for none"),
          .gain = s.gain,
          .gain_per_head = yes_or_no(s.gain_per_head, name + ".gain_per_head", of_heads),
          .inv_rms = s.inv_rms,
          .inv_rms_per_head = yes_or_no(s.inv_rms_per_head, name + ".inv_rms_per_head", of_heads),
          .rope = {s.rope.cos, s.rope.sin, s.rope.stride_b, s.rope.stride_s}};
}
FrontCall front_call_of(const sagebwd_front_args& a, void* stream) {
  return {.problem = problem_of(a.problem),
          .q = front_side_of(a.q, "q"),
          .k = front_side_of(a.k, "k"),
          .norm_eps = a.norm_eps,
          .rope_begin = a.rope_begin,
          .rope_channels = a.rope_channels,
          .rope_interleaved =
              yes_or_no(a.rope_interleaved, "rope_interleaved",
                        "0 for pairs (i, i + R/2) of channels, and 1 for (2i, 2i + 1)"),
          .stream = stream};
}
GateCall gate_call_of(const sagebwd_gate_args& a, void* stream) {
  return {.problem = problem_of(a.problem),
          .out = tensor_of(a.out),
          .gate = tensor_of(a.gate),
          .gated = tensor_of(a.gated),
          .stream = stream};
}
FrontSideGradients gradients_of(const sagebwd_front_gradients_side& s) {
  return {tensor_of(s.dx), s.dgain, s.gain_parts, s.dinv_rms};
}

/// Returns the arguments that both passes have.
template <typename Args, typename Given>
Args common(const Given& a, float softmax_scale, void* workspace, size_t workspace_bytes,
            void* stream) {
  Args args;
  args.problem = problem_of(a.problem);
  args.q = tensor_of(a.q);
  args.k = tensor_of(a.k);
  args.v = tensor_of(a.v);
  args.out = tensor_of(a.out);
  args.lse = a.lse;
  args.softmax_scale = softmax_scale;
  args.workspace = workspace;
  args.workspace_bytes = workspace_bytes;
  args.stream = stream;
  args.packing = packing_of(a.packing);
  args.value_dim = a.value_dim;
  args.k_mean = a.k_mean;
  args.lists = lists_of(a.lists);
  args.shares = shares_of(a.shares);
  args.intervals = intervals_of(a.intervals);
  args.tables = tables_of(a.tables);
  return args;
}

} // namespace

const char* sagebwd_last_error() { return last_error.c_str(); }
const char* sagebwd_version() { return version(); }

sagebwd_status sagebwd_suggest_nvrtc(const char* file) {
  return guarded([&] {
    given(file, "file");
    nvrtc::suggest(file, "suggested by the caller");
  });
}

sagebwd_status sagebwd_create(const char* spec, int device, sagebwd_operation** operation) {
  return guarded([&] {
    given(operation, "operation") = nullptr;
    *operation = new sagebwd_operation(&given(spec, "spec"), device);
  });
}

void sagebwd_destroy(sagebwd_operation* operation) { delete operation; }

const char* sagebwd_spec(const sagebwd_operation* operation) {
  return operation ? operation->spec.c_str() : nullptr;
}

float sagebwd_usual_scale(const sagebwd_operation* operation) {
  return operation ? 1 / std::sqrt(static_cast<float>(operation->attention.spec()->head_dim)) : 0;
}

sagebwd_status sagebwd_warmup(sagebwd_operation* operation, const sagebwd_warmup_args* args) {
  return guarded([&] {
    Attention& attention = given(operation, "operation").attention;
    const sagebwd_warmup_args a = arguments(args);
    if (a.backward != 0 && a.backward != 1)
      throw SpecError("backward = " + std::to_string(a.backward) +
                      " is not supported: it is 1 for the kernels of both passes, and 0 for those "
                      "of the forward");
    const sagebwd_problem& p = a.problem;
    if (p.batch || p.heads || p.heads_kv || p.seq_q || p.seq_kv)
      attention.warmup(a.backward != 0, problem_of(p));
    else
      attention.warmup(a.backward != 0);
  });
}

sagebwd_status sagebwd_workspace_bytes(const sagebwd_operation* operation,
                                       const sagebwd_problem* problem, size_t* forward,
                                       size_t* backward) {
  return guarded([&] {
    const Attention& attention = given(operation, "operation").attention;
    const Problem sizes = problem_of(given(problem, "problem"));
    if (forward)
      *forward = attention.forward_workspace_bytes(sizes);
    if (backward)
      *backward = attention.backward_workspace_bytes(sizes);
  });
}

sagebwd_status sagebwd_kept_sums_bytes(const sagebwd_operation* operation,
                                       const sagebwd_problem* problem, size_t* bytes) {
  return guarded([&] {
    const Attention& attention = given(operation, "operation").attention;
    const Problem sizes = problem_of(given(problem, "problem"));
    const size_t found = attention.kept_sums_bytes(sizes);
    if (bytes)
      *bytes = found;
  });
}

sagebwd_status sagebwd_pack_lists(sagebwd_operation* operation, const sagebwd_pack_args* args,
                                  void* stream) {
  return guarded([&] {
    const sagebwd_pack_args a = arguments(args);
    given(operation, "operation")
        .attention.pack_lists({problem_of(a.problem), a.mask, a.indices, a.width, a.counts,
                               intervals_of(a.intervals), tables_of(a.tables), a.row_bits, stream});
  });
}

sagebwd_status sagebwd_forward(sagebwd_operation* operation, const sagebwd_forward_args* args,
                               float softmax_scale, void* workspace, size_t workspace_bytes,
                               void* stream) {
  return guarded([&] {
    Attention& attention = given(operation, "operation").attention;
    const sagebwd_forward_args a = arguments(args);
    auto forward = common<ForwardArgs>(a, softmax_scale, workspace, workspace_bytes, stream);
    forward.sparse_out = tensor_of(a.sparse_out);
    forward.kept_sums = a.kept_sums;
    forward.max_logits = a.max_logits;
    attention.forward(forward);
  });
}

sagebwd_status sagebwd_backward(sagebwd_operation* operation, const sagebwd_backward_args* args,
                                float softmax_scale, void* workspace, size_t workspace_bytes,
                                void* stream) {
  return guarded([&] {
    Attention& attention = given(operation, "operation").attention;
    const sagebwd_backward_args a = arguments(args);
    auto backward = common<BackwardArgs>(a, softmax_scale, workspace, workspace_bytes, stream);
    backward.dout = tensor_of(a.dout);
    backward.dlse = a.dlse;
    backward.dq = tensor_of(a.dq);
    backward.dk = tensor_of(a.dk);
    backward.dv = tensor_of(a.dv);
    backward.dalpha = a.dalpha;
    backward.kept_sums = a.kept_sums;
    attention.backward(backward);
  });
}

sagebwd_status sagebwd_front(sagebwd_operation* operation, const sagebwd_front_args* args,
                             void* stream) {
  return guarded([&] {
    const Attention& attention = given(operation, "operation").attention;
    front(front_call_of(arguments(args), stream), attention);
  });
}

sagebwd_status sagebwd_front_gradients(sagebwd_operation* operation,
                                       const sagebwd_front_gradients_args* args, void* stream) {
  return guarded([&] {
    const Attention& attention = given(operation, "operation").attention;
    const sagebwd_front_gradients_args a = arguments(args);
    front_gradients({.of = front_call_of(arguments(a.of, "args->of"), stream),
                     .q = gradients_of(a.q),
                     .k = gradients_of(a.k)},
                    attention);
  });
}

sagebwd_status sagebwd_gate(sagebwd_operation* operation, const sagebwd_gate_args* args,
                            void* stream) {
  return guarded([&] {
    const Attention& attention = given(operation, "operation").attention;
    gate(gate_call_of(arguments(args), stream), attention);
  });
}

sagebwd_status sagebwd_gate_gradients(sagebwd_operation* operation,
                                      const sagebwd_gate_gradients_args* args, void* stream) {
  return guarded([&] {
    const Attention& attention = given(operation, "operation").attention;
    const sagebwd_gate_gradients_args a = arguments(args);
    gate_gradients({.of = gate_call_of(arguments(a.of, "args->of"), stream),
                    .dout = tensor_of(a.dout),
                    .dgate = tensor_of(a.dgate)},
                   attention);
  });
}

sagebwd_status sagebwd_front_part_floats(const sagebwd_operation* operation,
                                         const sagebwd_problem* problem, int64_t* q, int64_t* k) {
  return guarded([&] {
    const ResolvedSpec& spec = given(operation, "operation").attention.spec();
    const Problem sizes = problem_of(given(problem, "problem"));
    check(spec, sizes);
    if (q)
      *q = front_part_floats(Tokens::queries, spec, sizes);
    if (k)
      *k = front_part_floats(Tokens::keys, spec, sizes);
  });
}
