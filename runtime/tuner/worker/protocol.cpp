//===- protocol.cpp - What a tuner and its worker say to each other ----------===//

#include "runtime/tuner/worker/protocol.h"

#include "cache/bounded_json.h"

#include "llvm/Support/FormatVariadic.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace sagebwd::tuner {
namespace {

using llvm::json::Array;
using llvm::json::Object;
using llvm::json::Value;

constexpr std::array<llvm::StringLiteral, 3> kOrders = {"open", "vet", "time"};
constexpr std::array<llvm::StringLiteral, 7> kReports = {"hello", "opened", "vetted", "starting",
                                                         "timed", "done",   "failed"};

/// Nothing where a line is no JSON object.
std::optional<Value> parse(const std::string& line) {
  constexpr int kDeepest = 8;
  return parse_bounded_json(line, kDeepest);
}

/// Nothing for an unknown word.
template <typename Kind, size_t N>
std::optional<Kind> kind_of(const std::array<llvm::StringLiteral, N>& names,
                            const std::string& text) {
  for (size_t i = 0; i < N; ++i)
    if (names[i] == text)
      return static_cast<Kind>(i);
  return std::nullopt;
}

std::string line(Object object) {
  return llvm::formatv("{0}", Value(std::move(object))).str() + "\n";
}

std::string utf8(const std::string& text) {
  return llvm::json::isUTF8(text) ? text : llvm::json::fixUTF8(text);
}
Value number(double value) { return std::isfinite(value) ? Value(value) : Value(nullptr); }

/// Members by name; remembers whether one was missing.
class Reader {
public:
  explicit Reader(const Object* object) : object_(object), sound_(object != nullptr) {}
  bool sound() const { return sound_; }

  std::string text(llvm::StringRef name) {
    return take(sound_ ? text_of(*object_, name) : std::nullopt);
  }
  int64_t integer(llvm::StringRef name) {
    return take(sound_ ? llvm_compat::to_optional<int64_t>(object_->getInteger(name))
                       : std::nullopt);
  }
  bool yes(llvm::StringRef name) {
    return take(sound_ ? llvm_compat::to_optional<bool>(object_->getBoolean(name)) : std::nullopt);
  }
  double real(llvm::StringRef name) {
    return take(sound_ ? llvm_compat::to_optional<double>(object_->getNumber(name)) : std::nullopt);
  }
  const Object* object(llvm::StringRef name) {
    return sound_ ? required(object_->getObject(name)) : nullptr;
  }
  const Array* array(llvm::StringRef name) {
    return sound_ ? required(object_->getArray(name)) : nullptr;
  }
  void require(bool condition) { sound_ = sound_ && condition; }

private:
  template <typename T> T take(std::optional<T> value) {
    require(value.has_value());
    return value ? *value : T{};
  }
  template <typename T> const T* required(const T* value) {
    require(value != nullptr);
    return value;
  }
  const Object* object_;
  bool sound_;
};

Object json_of(const BenchKernel& kernel) {
  const KernelSpec& spec = kernel.spec;
  return Object{{"kind", std::string(to_string(spec.kind))},
                {"pass", std::string(to_string(spec.pass))},
                {"spec", to_string(spec.attention)},
                {"arch", std::string(spec.arch.name)},
                {"tile", to_string(spec.tile)},
                {"name", utf8(kernel.name)},
                {"threads", kernel.threads},
                {"shared_bytes", kernel.shared_bytes},
                {"cubin_at", static_cast<int64_t>(kernel.cubin_at)},
                {"cubin_bytes", static_cast<int64_t>(kernel.cubin_bytes)}};
}

/// Raises SpecError for words that are none, which the callers below catch.
BenchKernel kernel_of(const Object* object, Reader& outer) {
  Reader r(object);
  BenchKernel kernel{};
  const std::string kind = r.text("kind"), pass = r.text("pass"), spec = r.text("spec"),
                    arch = r.text("arch"), tile = r.text("tile");
  kernel.cubin_at = static_cast<size_t>(r.integer("cubin_at"));
  kernel.cubin_bytes = static_cast<size_t>(r.integer("cubin_bytes"));
  kernel.name = r.text("name");
  kernel.threads = static_cast<int>(r.integer("threads"));
  kernel.shared_bytes = static_cast<int>(r.integer("shared_bytes"));
  outer.require(r.sound());
  if (r.sound())
    kernel.spec = {parse_word<KernelKind>(kind), parse_word<Pass>(pass), parse_spec(spec),
                   find_arch(arch), parse_tile(tile)};
  return kernel;
}

Array json_of(const std::vector<BenchKernel>& kernels) {
  Array array;
  for (const BenchKernel& kernel : kernels)
    array.push_back(json_of(kernel));
  return array;
}

std::vector<BenchKernel> kernels_of(const Array* array, Reader& r) {
  std::vector<BenchKernel> kernels;
  for (size_t i = 0; array && i < array->size(); ++i)
    kernels.push_back(kernel_of((*array)[i].getAsObject(), r));
  return kernels;
}

Object json_of(const BenchSetup& setup) {
  const Problem& p = setup.problem;
  return Object{{"device", setup.device},
                {"gpu", setup.gpu},
                {"spec", to_string(*setup.spec)},
                {"problem", Array{p.batch, p.heads, p.heads_kv, p.seq_q, p.seq_kv}},
                {"kind", std::string(to_string(setup.kind))},
                {"operation", json_of(setup.operation)},
                {"exact", setup.exact}};
}

BenchSetup setup_of(const Object* object, Reader& outer) {
  Reader r(object);
  BenchSetup setup;
  setup.device = static_cast<int>(r.integer("device"));
  setup.gpu = r.text("gpu");
  const std::string spec = r.text("spec"), kind = r.text("kind");
  setup.exact = r.yes("exact");
  if (const Array* problem = r.array("problem")) {
    std::array<int64_t, 5> sizes{};
    r.require(problem->size() == sizes.size());
    for (size_t i = 0; i < sizes.size() && r.sound(); ++i) {
      const auto size = llvm_compat::to_optional<int64_t>((*problem)[i].getAsInteger());
      r.require(size.has_value());
      sizes[i] = size.value_or(0);
    }
    setup.problem = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
  }
  setup.operation = kernels_of(r.array("operation"), r);
  outer.require(r.sound());
  if (r.sound()) {
    setup.spec = resolved(parse_spec(spec));
    setup.kind = parse_word<KernelKind>(kind);
  }
  return setup;
}

} // namespace

std::string line_of(const Order& order) {
  Object object{{"order", kOrders[order.kind]},
                {"candidate", order.candidate},
                {"candidates", Array(order.candidates)},
                {"rounds", order.rounds}};
  if (order.kind == Order::open) {
    object["setup"] = json_of(order.setup);
    object["kernels"] = json_of(order.kernels);
  }
  return line(std::move(object));
}

std::optional<Order> parse_order(const std::string& text) try {
  const std::optional<Value> value = parse(text);
  Reader r(value ? value->getAsObject() : nullptr);
  const std::optional<Order::Kind> kind = kind_of<Order::Kind>(kOrders, r.text("order"));
  if (!kind)
    return std::nullopt;
  Order order;
  order.kind = *kind;
  order.candidate = static_cast<int>(r.integer("candidate"));
  order.rounds = static_cast<int>(r.integer("rounds"));
  if (const Array* candidates = r.array("candidates"))
    for (const Value& candidate : *candidates) {
      const auto index = llvm_compat::to_optional<int64_t>(candidate.getAsInteger());
      r.require(index.has_value());
      order.candidates.push_back(static_cast<int>(index.value_or(-1)));
    }
  if (order.kind == Order::open) {
    order.setup = setup_of(r.object("setup"), r);
    order.kernels = kernels_of(r.array("kernels"), r);
  }
  return r.sound() ? std::optional(std::move(order)) : std::nullopt;
} catch (const SpecError&) {
  return std::nullopt;
}

std::string line_of(const Report& report) {
  const Vetting& vetting = report.vetting;
  return line(
      Object{{"report", kReports[report.kind]},
             {"protocol", report.protocol},
             {"candidate", report.candidate},
             {"ms", number(report.ms)},
             {"detail", utf8(report.detail)},
             {"wrong", utf8(vetting.wrong)},
             {"identical", vetting.identical},
             // Infinite where an output is not finite, which JSON lacks.
             {"rel_l2", number(std::min(vetting.rel_l2, std::numeric_limits<double>::max()))},
             {"vetting_ms", number(vetting.ms)}});
}

std::optional<Report> parse_report(const std::string& text) {
  const std::optional<Value> value = parse(text);
  Reader r(value ? value->getAsObject() : nullptr);
  const std::optional<Report::Kind> kind = kind_of<Report::Kind>(kReports, r.text("report"));
  if (!kind)
    return std::nullopt;
  Report report;
  report.kind = *kind;
  report.protocol = static_cast<int>(r.integer("protocol"));
  if (report.kind != Report::hello) { // which is all that another version's worker shares with ours
    report.candidate = static_cast<int>(r.integer("candidate"));
    report.ms = r.real("ms");
    report.detail = r.text("detail");
    report.vetting = {r.text("wrong"), r.yes("identical"), r.real("rel_l2"), r.real("vetting_ms")};
  }
  return r.sound() ? std::optional(report) : std::nullopt;
}

} // namespace sagebwd::tuner
