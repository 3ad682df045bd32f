//===- protocol.cpp - Messages between a tuner and its worker -------------===//

#include "runtime/tuner/worker/protocol.h"

#include "cache/bounded_json.h"

#include "llvm/Support/FormatVariadic.h"

namespace sagebwd {

//===--- What is sent as a word or a line of text -------------------------===//

template <> struct Words<tuner::Order::Kind> {
  static constexpr const char* what = "order";
  static constexpr Word<tuner::Order::Kind> all[] = {
      {tuner::Order::open, "open"}, {tuner::Order::vet, "vet"}, {tuner::Order::time, "time"}};
};
template <> struct Words<tuner::Report::Kind> {
  static constexpr const char* what = "report";
  static constexpr Word<tuner::Report::Kind> all[] = {
      {tuner::Report::hello, "hello"},   {tuner::Report::opened, "opened"},
      {tuner::Report::vetted, "vetted"}, {tuner::Report::starting, "starting"},
      {tuner::Report::timed, "timed"},   {tuner::Report::done, "done"},
      {tuner::Report::failed, "failed"}};
};

static std::string_view to_string(const Arch& arch) { return arch.name; }

// These functions raise SpecError for a text that is not valid.
template <Worded T> static void parse(const std::string& text, T& word) {
  word = parse_word<T>(text);
}
static void parse(const std::string& text, AttentionSpec& spec) { spec = parse_spec(text); }
static void parse(const std::string& text, ResolvedSpec& spec) {
  spec = resolved(parse_spec(text));
}
static void parse(const std::string& text, Arch& arch) { arch = find_arch(text); }
static void parse(const std::string& text, TileConfig& tile) { tile = parse_tile(text); }

template <typename T>
concept SentAsText = requires(T& value) {
  parse(std::string(), value);
};
template <SentAsText T> llvm::json::Value as_json(const T& value) {
  return std::string(to_string(value));
}
template <SentAsText T> bool read_json(const llvm::json::Value* json, T& value) {
  std::string text;
  const bool sound = read_json(json, text);
  if (sound)
    parse(text, value);
  return sound;
}

//===--- Structs and their members ----------------------------------------===//

template <Either<Problem> Self, typename Visit> void visit_members(Self& problem, Visit&& visit) {
  visit_fields(problem, [&](const Label& label, auto& value) { visit(label.name.data(), value); });
}

template <Either<BenchKernel> Self, typename Visit>
void visit_members(Self& kernel, Visit&& visit) {
  visit("kind", kernel.spec.kind);
  visit("pass", kernel.spec.pass);
  visit("spec", kernel.spec.attention);
  visit("arch", kernel.spec.arch);
  visit("tile", kernel.spec.tile);
  visit("name", kernel.name);
  visit("threads", kernel.threads);
  visit("shared_bytes", kernel.shared_bytes);
  visit("cubin_at", kernel.cubin_at);
  visit("cubin_bytes", kernel.cubin_bytes);
}

template <Either<BenchSetup> Self, typename Visit> void visit_members(Self& setup, Visit&& visit) {
  visit("device", setup.device);
  visit("gpu", setup.gpu);
  visit("spec", setup.spec);
  visit("problem", setup.problem);
  visit("kind", setup.kind);
  visit("operation", setup.operation);
  visit("exact", setup.exact);
}

template <Either<Vetting> Self, typename Visit> void visit_members(Self& vetting, Visit&& visit) {
  visit("wrong", vetting.wrong);
  visit("identical", vetting.identical);
  visit("rel_l2", vetting.rel_l2);
  visit("ms", vetting.ms);
}

namespace tuner {

// Argument-dependent lookup finds these by the namespace of Order::Kind and Report::Kind.
using sagebwd::as_json;
using sagebwd::read_json;

template <Either<Order> Self, typename Visit> void visit_members(Self& order, Visit&& visit) {
  visit("order", order.kind);
  visit("candidate", order.candidate);
  visit("candidates", order.candidates);
  visit("rounds", order.rounds);
  if (order.kind == Order::open) {
    visit("setup", order.setup);
    visit("kernels", order.kernels);
  }
}

template <Either<Report> Self, typename Visit> void visit_members(Self& report, Visit&& visit) {
  visit("report", report.kind);
  visit("protocol", report.protocol);
  if (report.kind == Report::hello) // a worker of another version has only the members above
    return;
  visit("candidate", report.candidate);
  visit("vetting", report.vetting);
  visit("ms", report.ms);
  visit("detail", report.detail);
}

namespace {

template <typename Message> std::string print(const Message& message) {
  return llvm::formatv("{0}\n", llvm::json::Value(object_of(message)));
}

template <typename Message> std::optional<Message> parse(const std::string& line) try {
  constexpr int kDeepest = 8;
  const std::optional<llvm::json::Value> value = parse_bounded_json(line, kDeepest);
  Message message;
  const bool sound = value && read_object(value->getAsObject(), message, kAnyNumber);
  return sound ? std::optional(std::move(message)) : std::nullopt;
} catch (const SpecError&) { // a word or text is not valid
  return std::nullopt;
}

} // namespace

std::string line_of(const Order& order) { return print(order); }
std::string line_of(const Report& report) { return print(report); }
std::optional<Order> parse_order(const std::string& line) { return parse<Order>(line); }
std::optional<Report> parse_report(const std::string& line) { return parse<Report>(line); }

} // namespace tuner
} // namespace sagebwd
