//===- gpu_bench.cpp - Run candidates on a GPU ----------------------------===//

#include "runtime/tuner/worker/gpu_bench.h"

#include "generator/definition.h"
#include "generator/pointwise.h"
#include "runtime/arguments.h"
#include "runtime/loaded_kernel.h"
#include "runtime/on_gpu.h"
#include "runtime/reference/reference.h"
#include "runtime/settings.h"
#include "runtime/tuner/worker/worker.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <sys/socket.h>
#include <unistd.h>

namespace sagebwd {
namespace {

/// More than twice the largest known L2 cache of a GPU (126 MB).
constexpr size_t kFlushBytes = size_t{256} << 20;
constexpr int kVettingRuns = 2; // runs of each candidate, because a race shows only by chance

/// Device memory that a kernel writes, and the bytes that the default tile wrote there.
struct Written {
  Output output;
  driver::Pointer pointer;
  std::string by_default;
  const char* name() const { return name_of(output.operand).data(); }
  size_t value_bytes() const { return output.type == Output::floats ? 4 : 2; }
  size_t bytes() const { return value_bytes() * static_cast<size_t>(output.values); }
};

std::string download(const Written& written) {
  std::string bytes(written.bytes(), '\0');
  driver::copy_to_host(bytes.data(), written.pointer, written.bytes());
  return bytes;
}

double value_at(const Written& written, const std::string& bytes, size_t i, DType dtype) {
  if (written.output.type == Output::floats) {
    float value;
    std::memcpy(&value, bytes.data() + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes.data() + 2 * i, 2);
  return reference::decode(dtype, bits);
}

bool has_poison(const Written& written, const std::string& bytes) {
  const size_t size = written.value_bytes();
  const char poison[4] = {'\xff', '\xff', '\xff', '\xff'};
  for (size_t at = 0; at + size <= bytes.size(); at += size)
    if (std::memcmp(bytes.data() + at, poison, size) == 0)
      return true;
  return false;
}

/// ||x - default|| / ||default||; infinite if one value is not finite and the other differs.
double rel_l2(const Written& written, const std::string& bytes, DType dtype) {
  double error = 0, norm = 0;
  const size_t size = written.value_bytes();
  for (size_t i = 0; i < bytes.size() / size; ++i) {
    if (std::memcmp(bytes.data() + size * i, written.by_default.data() + size * i, size) == 0 &&
        !std::isfinite(value_at(written, bytes, i, dtype)))
      continue;
    const double x = value_at(written, bytes, i, dtype);
    const double expected = value_at(written, written.by_default, i, dtype);
    error += (x - expected) * (x - expected);
    norm += expected * expected;
  }
  if (!std::isfinite(error))
    return INFINITY;
  return norm > 0 ? std::sqrt(error / norm) : error > 0 ? INFINITY : 0;
}

/// Normal numbers of 16 bits; repeated, they fill any tensor. Their count has no factor in common
/// with a tensor's sizes, so no two tokens or heads are equal.
std::vector<uint16_t> normal_numbers(DType dtype) {
  constexpr int64_t kCount = (int64_t{1} << 21) - 9; // a prime
  const reference::Inputs in =
      reference::random_inputs({1, 1, 1, (kCount + 63) / 64, 1}, 64, dtype, 1.0, /*seed=*/1);
  std::vector<uint16_t> bits(kCount);
  for (int64_t i = 0; i < kCount; ++i)
    bits[i] = reference::encode(dtype, in.q[i]);
  return bits;
}

void upload_repeated(const driver::Memory& buffer, const std::vector<uint16_t>& numbers,
                     size_t first) {
  size_t at = 0;
  while (at < buffer.bytes()) {
    const size_t bytes = std::min(buffer.bytes() - at, 2 * (numbers.size() - first));
    driver::copy_to_device(buffer.pointer() + at, numbers.data() + first, bytes);
    at += bytes;
    first = 0;
  }
}

/// Whether tuning passes a tensor of tokens. Optional tensors are left out: kernels take as long
/// without them.
bool is_used(const CallerTensor& tensor, bool backward) {
  return (backward || tensor.in_forward) && !tensor.optional && // packed specs are not tuned
         !tensor.mixed && tensor.of != CallerTensor::lists;
}
/// The words of all lists of a spec that has lists, else 0.
int64_t words_of_lists(const AttentionSpec& s, const Problem& p) {
  return is_sparse(s) ? p.batch * p.heads * list_blocks(Tokens::queries, s, p) * list_words(s, p)
                      : 0;
}
/// Lists of a sixteenth of all blocks. None of the marks behind the last block is set.
std::vector<uint32_t> random_lists(const AttentionSpec& s, const Problem& p) {
  std::mt19937 draw(1);
  std::vector<uint32_t> words(static_cast<size_t>(words_of_lists(s, p)));
  for (uint32_t& word : words)
    word = draw() & draw() & draw() & draw() & 0x7fffffff;
  return words;
}
/// Each key's numbers, which hide no query.
std::vector<int32_t> open_intervals(const AttentionSpec& s, const Problem& p) {
  std::vector<int32_t> numbers(static_cast<size_t>(p.seq_kv * s.intervals),
                               static_cast<int32_t>(p.seq_q));
  if (s.intervals == 2 && s.causal == Causal::none) // the second ends what begins at 0
    for (size_t i = 1; i < numbers.size(); i += 2)
      numbers[i] = 0;
  return numbers;
}
int token_bytes(const CallerTensor& tensor, const ResolvedSpec& spec) {
  return tensor.strided() ? 2 * spec->head_dim : 4;
}

/// The ordinal of the GPU in this process. Another GPU may have this number in the tuner's process
/// if the environment has changed since.
int ordinal_of(const BenchSetup& setup) {
  if (setup.gpu.empty())
    return setup.device;
  for (int ordinal = 0; ordinal < driver::device_count(); ++ordinal)
    if (driver::device_info(ordinal).uuid == setup.gpu)
      return ordinal;
  throw LibraryError("GPU " + std::to_string(setup.device) + " of the tuner, " + setup.gpu +
                     ", is not seen by its worker: CUDA_VISIBLE_DEVICES was changed after the "
                     "tuner's process had opened the driver; set it before");
}

} // namespace

double bench_bytes(KernelKind kind, const ResolvedSpec& spec, const Problem& p) {
  const bool backward = tiling_of(kind).pass == Pass::backward;
  // In floating point, so that lengths which no GPU holds do not overflow.
  double bytes = kFlushBytes;
  for (const CallerTensor& tensor : caller_tensors())
    if (is_used(tensor, backward))
      bytes += static_cast<double>(p.batch) * static_cast<double>(heads_of(tensor.tokens, p)) *
               static_cast<double>(tokens_of(tensor.tokens, p)) * token_bytes(tensor, spec);
  bytes += 4.0 * static_cast<double>(words_of_lists(spec, p));
  if (bytes > 1e18) // such a workspace's size overflows integers
    return bytes;
  return bytes + static_cast<double>(workspace_bytes(Pass::forward, spec, p)) +
         (backward ? static_cast<double>(workspace_bytes(Pass::backward, spec, p)) : 0);
}

struct GpuBench::State {
  explicit State(const BenchSetup& given)
      : setup(given), device(ordinal_of(given)), scope(device) {}

  const driver::Memory& make(size_t bytes);
  void allocate();
  void find_outputs();
  void run_operation();
  const LoadedKernel& loaded(const BenchKernel&);
  void run(const LoadedKernel& kernel) {
    launch(kernel, setup.problem, values[static_cast<int>(kernel.spec.pass)], nullptr);
  }
  double run_timed(const LoadedKernel&);

  BenchSetup setup;
  int device;
  driver::DeviceScope scope;
  std::vector<std::unique_ptr<driver::Memory>> buffers;
  OperandValues values[2] = {}; ///< one for each pass
  driver::Pointer flush = 0;
  std::vector<Written> outputs;                ///< of the kernel whose tiles compete
  std::map<std::string, LoadedKernel> kernels; ///< the key is the machine code
  driver::Stopwatch stopwatch;
};

const driver::Memory& GpuBench::State::make(size_t bytes) {
  try {
    buffers.push_back(std::make_unique<driver::Memory>(std::max<size_t>(bytes, 256)));
  } catch (const DriverError& error) {
    constexpr int kOutOfMemory = 2; // CUDA_ERROR_OUT_OF_MEMORY
    if (error.code != kOutOfMemory)
      throw;
    size_t held = 0;
    for (const auto& buffer : buffers)
      held += buffer->bytes();
    throw DriverError(std::string(error.what()) + ". The worker holds " +
                          std::to_string(held >> 20) + " MiB of buffers and needs another " +
                          std::to_string(bytes >> 20) +
                          " MiB: free memory on the GPU, or tune a smaller batch",
                      error.code);
  }
  return *buffers.back();
}

void GpuBench::State::allocate() {
  const Problem& p = setup.problem;
  const int64_t d = setup.spec->head_dim;
  const bool backward = tiling_of(setup.kind).pass == Pass::backward;
  const std::vector<uint16_t> numbers = normal_numbers(setup.spec->dtype);
  OperandValues& forward_values = values[static_cast<int>(Pass::forward)];

  size_t given = 0; // the number of tensors that have been filled
  for (const CallerTensor& tensor : caller_tensors()) {
    if (!is_used(tensor, backward))
      continue;
    const int64_t heads = heads_of(tensor.tokens, p), tokens = tokens_of(tensor.tokens, p);
    const driver::Memory& buffer =
        make(static_cast<size_t>(p.batch * heads * tokens * token_bytes(tensor, setup.spec)));
    if (!tensor.written)
      upload_repeated(buffer, numbers, ++given * numbers.size() / 7);
    if (tensor.strided())
      set_tensor(forward_values, tensor.operand, buffer.pointer(),
                 {heads * tokens * d, tokens * d, d});
    else
      set(forward_values, tensor.operand, buffer.pointer());
  }
  if (is_sparse(*setup.spec)) {
    const std::vector<uint32_t> lists = random_lists(*setup.spec, p);
    const driver::Memory& buffer = make(lists.size() * sizeof(uint32_t));
    driver::copy_to_device(buffer.pointer(), lists.data(), lists.size() * sizeof(uint32_t));
    const size_t of_head = lists.size() / static_cast<size_t>(p.batch * p.heads);
    set(forward_values, Operand::row_bits, buffer.pointer());
    set(forward_values, Operand::row_stride_h, uint64_t{of_head});
    set(forward_values, Operand::row_stride_b, of_head * static_cast<uint64_t>(p.heads));
  }
  const auto upload = [&](const std::vector<int32_t>& numbers) {
    const driver::Memory& buffer = make(numbers.size() * sizeof(int32_t));
    driver::copy_to_device(buffer.pointer(), numbers.data(), buffer.bytes());
    return buffer.pointer();
  };
  if (has_intervals(*setup.spec)) // which all sequences and heads share
    set(forward_values, Operand::intervals, upload(open_intervals(*setup.spec, p)));
  for (size_t i = 0; i < tables_of(*setup.spec).size(); ++i) {
    // One zero, which every index means, for it is clamped.
    const Operand table = table_operand(static_cast<int>(i));
    set(forward_values, table, upload({0}));
    put_sizes_of(forward_values, table, {nullptr, 1, 1});
  }
  set(forward_values, Operand::softmax_scale, 1 / std::sqrt(static_cast<float>(d)));
  values[static_cast<int>(Pass::backward)] = forward_values;
  for (Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !backward)
      break;
    const driver::Memory& workspace = make(workspace_bytes(pass, setup.spec, p));
    driver::fill(workspace.pointer(), kPoison, workspace.bytes());
    place_workspace(pass, setup.spec, p, workspace.pointer(), values[static_cast<int>(pass)]);
  }
  flush = make(kFlushBytes).pointer();
}

void GpuBench::State::find_outputs() {
  const Tiling& tiling = tiling_of(setup.kind);
  for (const Output& output : tiling.outputs(setup.spec, setup.problem))
    outputs.push_back({output, get(values[static_cast<int>(tiling.pass)], output.operand), ""});
}

void GpuBench::State::run_operation() {
  for (const Written& written : outputs)
    driver::fill(written.pointer, kPoison, written.bytes());
  for (const BenchKernel& kernel : setup.operation)
    run(loaded(kernel));
  driver::synchronize();
  for (Written& written : outputs) {
    written.by_default = download(written);
    if (written.output.whole && has_poison(written, written.by_default))
      throw SpecError(std::string("the default tile leaves elements of ") + written.name() +
                      " unwritten: a defect of its kernel");
  }
}

const LoadedKernel& GpuBench::State::loaded(const BenchKernel& kernel) {
  const std::string identity = kernel.name + kernel.cubin;
  auto found = kernels.find(identity);
  if (found == kernels.end())
    found = kernels
                .emplace(identity, load_kernel(kernel.spec, kernel.name, kernel.cubin,
                                               kernel.threads, kernel.shared_bytes, device))
                .first;
  return found->second;
}

double GpuBench::State::run_timed(const LoadedKernel& kernel) {
  // The fill also takes longer than the host's launch calls, so that the launch is not timed.
  driver::fill(flush, 0, kFlushBytes);
  stopwatch.start();
  run(kernel);
  stopwatch.stop();
  return stopwatch.milliseconds();
}

GpuBench::GpuBench() = default;
GpuBench::~GpuBench() = default;

void GpuBench::open(const BenchSetup& setup) {
  if (const std::string& why = driver::unavailable(); !why.empty())
    throw LibraryError(why);
  check(setup.spec, setup.problem);
  state_ = std::make_unique<State>(setup);
  state_->allocate();
  state_->find_outputs();
  state_->run_operation();
}

Vetting GpuBench::vet(const BenchKernel& kernel) {
  State& s = *state_;
  const LoadedKernel& loaded = s.loaded(kernel);
  Vetting vetting;
  for (int run = 0; run < kVettingRuns; ++run) {
    for (const Written& written : s.outputs)
      driver::fill(written.pointer, kPoison, written.bytes());
    vetting.ms = s.run_timed(loaded);
    driver::synchronize();
    for (const Written& written : s.outputs) {
      const std::string bytes = download(written);
      if (bytes == written.by_default)
        continue;
      vetting.identical = false;
      if (written.output.whole && has_poison(written, bytes)) {
        vetting.wrong = std::string(written.name()) + " is not wholly written";
        return vetting;
      }
      const double error = rel_l2(written, bytes, s.setup.spec->dtype);
      vetting.rel_l2 = std::max(vetting.rel_l2, error);
      if (!(error <= kLargestRelL2)) {
        char text[128];
        std::snprintf(text, sizeof(text), "%s differs from the default's by %.3g (rel. L2)",
                      written.name(), error);
        vetting.wrong = text;
        return vetting;
      }
    }
  }
  return vetting;
}

double GpuBench::time_ms(const BenchKernel& kernel) {
  return state_->run_timed(state_->loaded(kernel));
}

int tune_worker_main() {
  int type = 0;
  socklen_t size = sizeof(type);
  if (::getsockopt(STDIN_FILENO, SOL_SOCKET, SO_TYPE, &type, &size) != 0) {
    std::fprintf(stderr, "sagebwd tune-worker: the tuner starts this by itself; to tune, run "
                         "'sagebwd tune'\n");
    return 2;
  }
  leave_unknown_variables_to_others(); // the tuner's process has named them
  GpuBench bench;
  const int code = tuner::run_worker(bench);
  std::fflush(nullptr);
  // Destructors do not run: after a fault every driver call fails, and the process ends anyway.
  ::_exit(code);
}

} // namespace sagebwd
