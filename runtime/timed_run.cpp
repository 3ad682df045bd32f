//===- timed_run.cpp - The time of each kernel of a pass ------------------===//

#include "runtime/attention.h"
#include "runtime/driver/driver.h"

namespace sagebwd {
namespace {

/// A moment in the order of a stream.
class Moment {
public:
  explicit Moment(driver::Stream stream) { driver::record(event_, stream); }
  ~Moment() { driver::destroy_event(event_); }
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;
  double ms_since(const Moment& earlier) const {
    return driver::elapsed_ms(earlier.event_, event_);
  }

private:
  driver::Event event_ = driver::create_event();
};

} // namespace

std::vector<std::pair<KernelKind, double>>
PreparedPass::run_timed(std::span<const uint64_t> addresses, uint64_t workspace,
                        void* stream) const {
  const driver::DeviceScope scope(device());
  const auto on = static_cast<driver::Stream>(stream);
  std::vector<std::unique_ptr<Moment>> moments;
  moments.push_back(std::make_unique<Moment>(on));
  std::vector<KernelKind> kernels;
  run_each(addresses, workspace, stream, [&](KernelKind kernel) {
    moments.push_back(std::make_unique<Moment>(on));
    kernels.push_back(kernel);
  });
  std::vector<std::pair<KernelKind, double>> times;
  for (size_t i = 0; i < kernels.size(); ++i)
    times.emplace_back(kernels[i], moments[i + 1]->ms_since(*moments[i]));
  return times;
}

} // namespace sagebwd
