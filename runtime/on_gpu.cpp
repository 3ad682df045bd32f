//===- on_gpu.cpp - Run the kernels on host data --------------------------===//
#include "runtime/on_gpu.h"
#include "generator/pointwise.h"

#include "runtime/reference/mixture.h"

#include <algorithm>
#include <cmath>

namespace sagebwd {

namespace {

constexpr size_t kGuardBytes = 4096; ///< a multiple of the driver's alignment of 256 bytes
constexpr uint16_t kUnwritten = 0xffff;

/// The options for a packed spec. If no lengths are given, the sequences have one length each and
/// form a batch.
RunOptions as_packed(const AttentionSpec& spec, const Problem& p, RunOptions options) {
  if (spec.packed && options.lengths.empty()) {
    options.apart = true;
    options.lengths.assign(static_cast<size_t>(p.batch),
                           {static_cast<int>(p.seq_q), static_cast<int>(p.seq_kv)});
  }
  return options;
}

/// The problem as a call of the operation expects it.
Problem problem_of(Problem p, const RunOptions& options) {
  if (options.apart)
    p.seq_q *= p.batch, p.seq_kv *= p.batch;
  else if (!options.lengths.empty())
    p.batch = static_cast<int64_t>(options.lengths.size());
  return p;
}

} // namespace

std::vector<uint32_t> packed_lists(const AttentionSpec& spec, const reference::Inputs& in) {
  const int64_t blocks = list_blocks(Tokens::keys, spec, in.problem);
  const int64_t words = list_words(spec, in.problem);
  std::vector<uint32_t> bits(in.listed.size() / blocks * words);
  for (size_t i = 0; i < in.listed.size(); ++i)
    if (in.listed[i])
      bits[i / blocks * words + i % blocks / 32] |= 1u << i % blocks % 32;
  return bits;
}

void require_gpu(int device, const char* command) {
  const std::string what = std::string(command) + " runs kernels on a GPU. ";
  if (const std::string& why = driver::unavailable(); !why.empty())
    throw LibraryError(what + "Not here: " + why +
                       "\nWithout one, 'sagebwd trace --device cpu' "
                       "checks the numerics and 'sagebwd build' compiles.");
  if (device >= driver::device_count())
    throw LibraryError(what + "--gpu is " + std::to_string(device) + ", this machine has " +
                       std::to_string(driver::device_count()) + ", numbered from 0.");
}

Buffer::Buffer(size_t bytes, std::optional<uint8_t> start)
    : bytes_(bytes), guard_(start ? kGuardBytes : 0), memory_(bytes + 2 * guard_) {
  if (start)
    driver::fill(memory_.pointer(), kPoison, memory_.bytes());
  if (start && *start != kPoison)
    driver::fill(pointer(), *start, bytes);
}

void Buffer::check_guards(const char* name, Faults& faults) const {
  std::vector<uint8_t> guard(guard_);
  for (const auto& [where, place] :
       {std::pair{"before ", memory_.pointer()}, std::pair{"after ", pointer() + bytes_}}) {
    if (guard_)
      driver::copy_to_host(guard.data(), place, guard_);
    if (std::any_of(guard.begin(), guard.end(), [](uint8_t byte) { return byte != kPoison; }))
      faults.push_back(std::string("memory ") + where + name + " was written to");
  }
}

DeviceTensor::DeviceTensor(DType dtype, int64_t batch, int64_t heads, int64_t tokens,
                           int64_t channels, Layout layout, std::optional<uint8_t> start)
    : dtype_(dtype), sizes_{batch, heads, tokens, channels},
      buffer_(sizeof(uint16_t) * batch * heads * tokens * (channels + layout.padding), start) {
  const int64_t row = channels + layout.padding;
  view_ = {buffer_.as(), heads * tokens * row, layout.bshd ? row : tokens * row,
           layout.bshd ? heads * row : row};
}

template <typename Visit> void DeviceTensor::for_each(Visit visit) const {
  size_t index = 0;
  for (int64_t b = 0; b < sizes_[0]; ++b)
    for (int64_t h = 0; h < sizes_[1]; ++h)
      for (int64_t s = 0; s < sizes_[2]; ++s)
        for (int64_t c = 0; c < sizes_[3]; ++c)
          visit(b * view_.stride_b + h * view_.stride_h + s * view_.stride_s + c, index++);
}

void DeviceTensor::upload(const std::vector<float>& values) {
  if (values.size() != static_cast<size_t>(sizes_[0] * sizes_[1] * sizes_[2] * sizes_[3]))
    throw std::logic_error("a tensor is given " + std::to_string(values.size()) + " values");
  std::vector<uint16_t> bits(buffer_.bytes() / sizeof(uint16_t), kUnwritten);
  for_each([&](size_t at, size_t i) { bits[at] = reference::encode(dtype_, values[i]); });
  buffer_.upload(bits);
}

std::vector<float> DeviceTensor::download(const char* name, Faults& faults) const {
  std::vector<uint16_t> bits = buffer_.download<uint16_t>();
  std::vector<float> values(sizes_[0] * sizes_[1] * sizes_[2] * sizes_[3]);
  size_t unwritten = 0;
  for_each([&](size_t at, size_t i) {
    unwritten += bits[at] == kUnwritten;
    values[i] = reference::decode(dtype_, bits[at]);
    bits[at] = kUnwritten;
  });
  if (unwritten)
    faults.push_back(std::to_string(unwritten) + " elements of " + name + " were not written");
  if (std::any_of(bits.begin(), bits.end(), [](uint16_t x) { return x != kUnwritten; }))
    faults.push_back(std::string(name) + ": the padding between tokens was written to");
  buffer_.check_guards(name, faults);
  return values;
}

Operands::Operands(const Attention& attention, const reference::Inputs& in, const RunOptions& given)
    : problem(in.problem), dtype(attention.spec()->dtype), channels(in.head_dim),
      options(as_packed(attention.spec(), problem, given)), call(problem_of(problem, options)),
      forward_workspace(attention.forward_workspace_bytes(call), options.workspace_start) {
  q.upload(in.q);
  k.upload(in.k);
  v.upload(in.v);
  dout.upload(in.dout);
  if (!in.dlse.empty())
    dlse.upload(in.dlse);
  if (!in.k_mean.empty())
    k_mean.emplace(in.k_mean.size() * sizeof(float), options.start).upload(in.k_mean);
  forward.problem = backward.problem = call;
  std::vector<int32_t> queries = {0}, keys = {0};
  for (const auto& [of_queries, of_keys] : options.lengths) {
    queries.push_back(queries.back() + of_queries);
    keys.push_back(keys.back() + of_keys);
  }
  first_queries.upload(queries);
  first_keys.upload(keys);
  if (!options.lengths.empty())
    forward.packing = {first_queries.as<int32_t>(), first_keys.as<int32_t>()};
  if (!options.used.empty()) {
    std::vector<int32_t> used_q, used_kv;
    for (const auto& [of_queries, of_keys] : options.used)
      used_q.push_back(of_queries), used_kv.push_back(of_keys);
    lengths_q.upload(used_q);
    lengths_kv.upload(used_kv);
    forward.packing.lengths_q = lengths_q.as<int32_t>();
    forward.packing.lengths_kv = lengths_kv.as<int32_t>();
  }
  add_tables(in);
  if (has_intervals(attention.spec()))
    add_intervals(attention, in);
  else if (hides_anywhere(attention.spec()))
    add_lists_of_mask(attention);
  else if (is_sparse(attention.spec()))
    add_lists(attention.spec(), in);
  forward.packing.apart = options.apart;
  forward.value_dim = backward.value_dim = options.value_dim;
  backward.packing = forward.packing;
  forward.q = backward.q = q.view();
  forward.k = backward.k = k.view();
  forward.v = backward.v = v.view();
  forward.out = backward.out = out.view();
  forward.lse = lse.as<float>();
  backward.lse = forward.lse;
  backward.dout = dout.view();
  backward.dlse = in.dlse.empty() ? nullptr : dlse.as<float>();
  forward.k_mean = backward.k_mean = k_mean ? k_mean->as<float>() : nullptr;
  if (!in.shares.empty())
    add_shares(in);
  if (attention.spec()->max_logits) {
    max_logits.emplace(sizeof(float) * problem.heads, options.start);
    forward.max_logits = max_logits->as<float>();
  }
  backward.dq = dq.view();
  backward.dk = dk.view();
  backward.dv = dv.view();
  forward.softmax_scale = backward.softmax_scale =
      in.softmax_scale.value_or(1 / std::sqrt(static_cast<float>(channels)));
  forward.workspace = forward_workspace.as();
  forward.workspace_bytes = forward_workspace.bytes();
  backward_workspace.emplace(attention.prepare(backward).workspace_bytes(),
                             options.workspace_start);
  backward.workspace = backward_workspace->as();
  backward.workspace_bytes = backward_workspace->bytes();
  forward.stream = backward.stream = options.stream;
  // The copies and fills ran on the null stream; other streams do not wait for it.
  driver::synchronize();
}

void Operands::add_lists(const AttentionSpec& spec, const reference::Inputs& in) {
  const std::vector<uint32_t> bits =
      options.row_bits.empty() ? packed_lists(spec, in) : options.row_bits;
  row_bits.emplace(bits.size() * sizeof(uint32_t), options.start).upload(bits);
  const int64_t of_head = list_blocks(Tokens::queries, spec, problem) * list_words(spec, problem);
  const bool shared = static_cast<int64_t>(bits.size()) == of_head;
  forward.lists = backward.lists = {row_bits->as<uint32_t>(), shared ? 0 : problem.heads * of_head,
                                    shared ? 0 : of_head};
}

void Operands::add_intervals(const Attention& attention, const reference::Inputs& in) {
  const AttentionSpec& spec = attention.spec();
  intervals.emplace(in.intervals.size() * sizeof(int32_t), options.start).upload(in.intervals);
  const int64_t of_head = problem.seq_kv * spec.intervals;
  Problem packed = problem;
  if (in.sequences_share_intervals)
    packed.batch = 1;
  if (in.heads_share_intervals)
    packed.heads = packed.heads_kv = 1;
  forward.intervals = {intervals->as<int32_t>(),
                       in.sequences_share_intervals ? 0 : packed.heads_kv * of_head,
                       in.heads_share_intervals ? 0 : of_head};
  const int64_t words = list_blocks(Tokens::queries, spec, problem) * list_words(spec, problem);
  row_bits.emplace(packed.batch * packed.heads * words * sizeof(uint32_t), options.start);
  attention.pack_lists({.problem = packed,
                        .intervals = forward.intervals,
                        .row_bits = row_bits->as<uint32_t>(),
                        .stream = options.stream});
  forward.lists = {row_bits->as<uint32_t>(),
                   in.sequences_share_intervals ? 0 : packed.heads * words,
                   in.heads_share_intervals ? 0 : words};
  backward.lists = forward.lists, backward.intervals = forward.intervals;
}

void Operands::add_tables(const reference::Inputs& in) {
  for (const reference::TableOfNumbers& table : in.tables) {
    tables.emplace_back(table.numbers.size() * sizeof(int32_t), options.start);
    tables.back().upload(table.numbers);
    forward.tables[tables.size() - 1] = {tables.back().as<int32_t>(), table.rows, table.columns};
  }
  backward.tables = forward.tables;
}

void Operands::add_lists_of_mask(const Attention& attention) {
  const AttentionSpec& spec = attention.spec();
  Problem packed = problem;
  if (!mask_depends_on_batch(spec))
    packed.batch = 1;
  packed.heads_kv = packed.heads = mask_depends_on_head(spec) ? problem.heads : 1;
  const int64_t words = list_blocks(Tokens::queries, spec, problem) * list_words(spec, problem);
  row_bits.emplace(packed.batch * packed.heads * words * sizeof(uint32_t), options.start);
  attention.pack_lists({.problem = packed,
                        .tables = forward.tables,
                        .row_bits = row_bits->as<uint32_t>(),
                        .stream = options.stream});
  forward.lists = {row_bits->as<uint32_t>(), packed.batch > 1 ? packed.heads * words : 0,
                   packed.heads > 1 ? words : 0};
  backward.lists = forward.lists;
}

void Operands::add_shares(const reference::Inputs& in) {
  shares.emplace(rows_bytes(), options.start).upload(in.shares);
  dshares.emplace(rows_bytes(), options.start);
  sparse_out.emplace(dtype, problem.batch, problem.heads, problem.seq_q, channels, options.layout,
                     options.start);
  forward.shares = {shares->as<float>(), problem.heads * problem.seq_q,
                    problem.seq_q,       1,
                    /*tokens=*/1,        in.of_rest};
  backward.shares = forward.shares;
  forward.sparse_out = sparse_out->view();
  if (!in.of_rest)
    backward.out = forward.sparse_out;
  backward.dalpha = dshares->as<float>();
}

DeviceTensor Operands::queries(int channels) const {
  return DeviceTensor(dtype, problem.batch, problem.heads, problem.seq_q, channels, options.layout,
                      options.start);
}

DeviceTensor Operands::keys(int channels) const {
  return DeviceTensor(dtype, problem.batch, problem.heads_kv, problem.seq_kv, channels,
                      options.layout, options.start);
}

reference::Outputs<float> Operands::download(Faults& faults) const {
  reference::Outputs<float> result;
  result.o = out.download("out", faults);
  result.dq = dq.download("dq", faults);
  result.dk = dk.download("dk", faults);
  result.dv = dv.download("dv", faults);
  result.lse = lse.download<float>();
  const auto check_rows = [&](const char* name, const Buffer& rows) {
    const std::vector<uint32_t> bits = rows.download<uint32_t>();
    if (const auto unwritten = std::count(bits.begin(), bits.end(), 0xffffffffu))
      faults.push_back(std::to_string(unwritten) + " elements of " + name + " were not written");
    rows.check_guards(name, faults);
  };
  check_rows("lse", lse);
  if (dshares) {
    result.dshares = dshares->download<float>();
    check_rows("dalpha", *dshares);
    sparse_out->download("sparse_out", faults);
  }
  if (max_logits) {
    result.max_logits = max_logits->download<float>();
    check_rows("max_logits", *max_logits);
  }
  forward_workspace.check_guards("the forward workspace", faults);
  backward_workspace->check_guards("the backward workspace", faults);
  return result;
}

reference::Outputs<float> run_on_gpu(Attention& attention, int device,
                                     const reference::Inputs& inputs, const RunOptions& options,
                                     Faults* faults) {
  driver::DeviceScope scope(device);
  Operands operands(attention, inputs, options);
  attention.forward(operands.forward);
  attention.backward(operands.backward);
  driver::synchronize();
  Faults found;
  auto outputs = operands.download(found);
  if (!faults && !found.empty())
    throw LibraryError("the kernels of " + to_string(attention.spec()) + " are wrong: " + found[0]);
  if (faults)
    *faults = std::move(found);
  return outputs;
}

reference::Outputs<float> emulate_like(const AttentionSpec& spec, const reference::Inputs& in,
                                       const reference::Outputs<float>& run) {
  if (is_mixed(spec))
    return reference::emulated_mixture(in, spec);
  const reference::ProductPlan plan = reference::plan_of(spec.precision);
  reference::Inputs forward_only = in;
  forward_only.dout.clear();
  forward_only.dlse.clear();
  auto forward = reference::emulate(forward_only, spec, plan, /*keep_matrices=*/false,
                                    /*round_outputs=*/true);
  auto result = reference::emulate(in, spec, plan, /*keep_matrices=*/false, /*round_outputs=*/true,
                                   &run.o, &run.lse);
  result.o = std::move(forward.o);
  result.lse = std::move(forward.lse);
  result.max_logits = std::move(forward.max_logits);
  return result;
}

} // namespace sagebwd
