//===- attention_state.cpp - What the calls of an operation share ---------===//

#include "runtime/attention_state.h"
#include "runtime/driver/driver.h"
#include "runtime/kernels.h"
#include "runtime/pack_lists.h"

#include <cstdio>
#include <utility>

namespace sagebwd {

std::optional<std::vector<LoadedKernel>>
Attention::State::load(const std::vector<KernelSpec>& specs, bool may_load) {
  std::vector<KernelSpec> missing;
  for (const KernelSpec& spec : specs)
    if (!find_loaded(spec, device))
      missing.push_back(spec);
  if (!missing.empty() && !may_load)
    return std::nullopt;
  for (const auto& built : build_operation(missing, operation.spec()))
    load_once(*built, device);
  std::vector<LoadedKernel> result;
  for (const KernelSpec& spec : specs)
    result.push_back(*find_loaded(spec, device));
  return result;
}

/// If a tuned tile is not available here (for example offline), the default tile runs instead.
std::vector<LoadedKernel> Attention::State::load_chosen(Pass pass, const Problem& problem) {
  const std::vector<KernelSpec> chosen = tiles.kernels(pass, problem);
  std::string why;
  try {
    return *load(chosen, /*may_load=*/true);
  } catch (const CompileError& error) {
    why = error.what();
    if (!tiles.may_fall_back() || chosen == operation.kernels(pass))
      throw;
  } catch (const OfflineError& error) {
    why = error.what();
    if (!tiles.may_fall_back() || chosen == operation.kernels(pass))
      throw;
  }
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true))
    std::fprintf(stderr,
                 "sagebwd: warning: the default tile is used, for the tuned one cannot be "
                 "had: %s\n",
                 why.c_str());
  return *load(operation.kernels(pass), /*may_load=*/true);
}

/// A graph gets kernels that are already loaded: during a capture nothing is compiled, loaded or
/// tuned.
std::vector<LoadedKernel> Attention::State::load_while_capturing(Pass pass,
                                                                 const Problem& problem) {
  const std::vector<KernelSpec> chosen = tiles.kernels(pass, problem, /*may_tune=*/false);
  if (auto loaded = load(chosen, /*may_load=*/false))
    return *loaded;
  // Where these are the default ones another thread may load them just now, which is no fallback.
  if (tiles.may_fall_back() && chosen != operation.kernels(pass))
    if (auto by_default = load(operation.kernels(pass), /*may_load=*/false)) {
      static std::atomic<bool> warned{false};
      if (!warned.exchange(true))
        std::fprintf(stderr, "sagebwd: warning: a CUDA graph is captured with default tiles, for "
                             "the tuned ones are not loaded: warm up with the problem's size "
                             "before the capture\n");
      return *by_default;
    }
  throw not_loaded(std::string(to_string(pass)), operation.spec());
}

/// The kernels of a pass: chosen, built and loaded on first use. The device's context must be
/// current.
const std::vector<LoadedKernel>& Attention::State::kernels(Pass pass, const Problem& problem,
                                                           driver::Stream stream) {
  auto& slot = launches[static_cast<int>(pass)][tiles.bucket(pass, problem)];
  const auto current = [&]() -> const Launches* {
    const Launches* found = slot.load(std::memory_order_acquire);
    return found && found->generation == tiles.generation() ? found : nullptr;
  };
  if (const Launches* found = current())
    return found->kernels;
  std::lock_guard lock(mutex);
  if (const Launches* found = current())
    return found->kernels;
  const bool capturing = driver::is_capturing(stream);
  auto fresh = std::make_unique<Launches>();
  fresh->generation = tiles.generation();
  if (capturing) {
    fresh->kernels = load_while_capturing(pass, problem);
  } else {
    // If the records change meanwhile (this call's own tuning changes them, too), choose again.
    for (int attempt = 0; attempt < 3; ++attempt) {
      fresh->generation = tiles.generation();
      fresh->kernels = load_chosen(pass, problem);
      if (fresh->generation == tiles.generation())
        break;
    }
  }
  all_launches.push_back(std::move(fresh));
  const Launches* result = all_launches.back().get();
  if (!capturing) // the choice during a capture may be a fallback, so it is not kept
    slot.store(result, std::memory_order_release);
  return result->kernels;
}

} // namespace sagebwd
