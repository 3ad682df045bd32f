//===- advice_test.cpp - Errors name the option that is the cause ----------===//
//
// The tests take every spec that differs from the default in at most three options, on GPUs of
// every kind. If one of its options can be changed so that the spec is built, the refusal names
// such an option, and what it calls the cause is one, too.
//
//===----------------------------------------------------------------------===//

#include "generator/operation.h"
#include "tests/generator/specs.h"

#include <algorithm>

using namespace sagebwd;

namespace {

/// An option, the words by which errors speak of it, and its values, of which the first is the
/// default.
struct Option {
  const char* name;
  std::vector<const char*> words;
  std::vector<std::function<void(AttentionSpec&)>> values;
};

template <auto FIELD, typename... Value> auto setters(Value... values) {
  return std::vector<std::function<void(AttentionSpec&)>>{
      [values](AttentionSpec& s) { s.*FIELD = values; }...};
}

std::vector<Option> all_options() {
  using S = AttentionSpec;
  using enum Precision;
  return {
      {"head_dim", {"head dimension", "channels"}, setters<&S::head_dim>(128, 64, 72, 256)},
      {"precision",
       {"precision", "six-of-seven", "qk16", "dv16", "gradients16"},
       setters<&S::precision>(six_of_seven, qk16, dv16, gradients16)},
      {"granularity",
       {"'row'", "'block'", "granularity"},
       setters<&S::granularity>(Granularity::row, Granularity::block)},
      {"group_kv", {"group_kv", "keys of a quantisation group"}, setters<&S::group_kv>(0, 64, 128)},
      {"sink_keys", {"sink_keys", "first key"}, setters<&S::sink_keys>(-1, 0, 1)},
      {"causal", {"causal", "mask"}, setters<&S::causal>(Causal::none, Causal::top_left)},
      {"window", {"window"}, setters<&S::window_left>(kNoWindow, 100)},
      {"smooth_q", {"smooth_q"}, setters<&S::smooth_q>(false, true)},
      {"deterministic", {"deterministic"}, setters<&S::deterministic>(true, false)},
      {"dq_sums", {"dq_sums"}, setters<&S::dq_sums>(DqSums::fp32, DqSums::fp16)},
      {"dp_sums", {"dp_sums"}, setters<&S::dp_sums>(DpSums::fp32, DpSums::fp16)},
      {"gradient_kernels",
       {"gradient_kernels"},
       setters<&S::gradient_kernels>(Backward::either, Backward::split, Backward::fused)},
      {"packed", {"packed"}, setters<&S::packed>(false, true)},
      {"lists",
       {"lists", "blocks of"},
       {[](S& s) { s.sparse_q = s.sparse_kv = 0; },
        [](S& s) { s.sparse_q = 128, s.sparse_kv = 64; },
        [](S& s) { s.sparse_q = 64, s.sparse_kv = 128; }}},
  };
}

/// Why a spec is not built; empty if it is.
std::string refusal(const AttentionSpec& s, const Arch& arch) {
  try {
    const Operation operation(resolved(s), arch);
    for (Pass pass : test::kPasses)
      operation.kernels(pass);
  } catch (const SpecError& error) {
    return error.what();
  }
  return "";
}

/// GPUs with much and with little shared memory, with wgmma, and Blackwell.
const Arch* const kGpus[] = {&find_arch("sm_80"), &find_arch("sm_89"), &find_arch("sm_90a"),
                             &find_arch("sm_120")};

bool is_built_on(const AttentionSpec& s, const Arch& arch) { return refusal(s, arch).empty(); }
bool is_built(const AttentionSpec& s) {
  return std::any_of(std::begin(kGpus), std::end(kGpus),
                     [&](const Arch* arch) { return is_built_on(s, *arch); });
}
/// Whether the spec is built with another value of an option.
bool mends(const Option& option, const AttentionSpec& s, const auto& is_built) {
  return std::any_of(option.values.begin(), option.values.end(), [&](const auto& set) {
    AttentionSpec changed = s;
    set(changed);
    return is_built(changed);
  });
}
bool names(std::string_view text, const Option& option) {
  return std::any_of(option.words.begin(), option.words.end(),
                     [&](const char* word) { return text.find(word) != text.npos; });
}
/// A message without the line of the spec, which names every option.
std::string without_spec(std::string message, const AttentionSpec& s) {
  const size_t from = message.find(" d" + std::to_string(s.head_dim) + " ");
  const std::string last = " numerics=" + std::to_string(kNumerics);
  if (const size_t to = message.find(last); from != message.npos && to != message.npos)
    message.erase(from, to + last.size() - from);
  return message;
}

/// Finds what a message calls the cause: behind what is refused, and before an explanation.
std::string_view cause_in(std::string_view message) {
  const size_t from = message.find(" not supported ");
  return from == message.npos ? std::string_view()
                              : message.substr(from, message.find_first_of(":;", from) - from);
}

void expect_causes(const std::vector<Option>& options, const AttentionSpec& s, const Arch& arch) {
  const std::string message = refusal(s, arch), text = without_spec(message, s);
  if (message.empty())
    return;
  SCOPED_TRACE(to_string(s) + " on " + std::string(arch.name) + ": " + message);
  bool may_be_mended = false, names_a_remedy = false;
  std::vector<const Option*> right, wrong;
  for (const Option& option : options) {
    if (mends(option, s, [&](const AttentionSpec& other) { return is_built_on(other, arch); })) {
      may_be_mended = true;
      names_a_remedy = names_a_remedy || names(text, option);
    }
    if (names(cause_in(text), option))
      (mends(option, s, is_built) ? right : wrong).push_back(&option);
  }
  EXPECT_TRUE(!may_be_mended || names_a_remedy) << "no option is named that would mend it here";
  for (const Option* option : wrong)
    EXPECT_TRUE(right.empty()) << option->name << " is called a cause, and changes nothing";
}

TEST(Advice, ErrorsNameTheOptionsThatAreTheCause) {
  const std::vector<Option> options = all_options();
  for (const Arch* arch : kGpus)
    for (size_t a = 0; a < options.size(); ++a)
      for (size_t b = a + 1; b < options.size(); ++b)
        for (size_t c = b + 1; c < options.size(); ++c)
          for (const auto& of_a : options[a].values)
            for (const auto& of_b : options[b].values)
              for (const auto& of_c : options[c].values) {
                AttentionSpec s;
                of_a(s), of_b(s), of_c(s);
                expect_causes(options, s, *arch);
              }
}

/// It forms dV in 16 bits and dQ in INT8, which no kernel for all gradients does.
TEST(Advice, OneKernelForAllGradientsIsRefusedForThePrecisionWithoutOne) {
  for (bool deterministic : {true, false})
    for (const Arch* arch : kGpus) {
      AttentionSpec s;
      s.head_dim = 64, s.precision = Precision::dv16, s.deterministic = deterministic;
      s.gradient_kernels = Backward::fused;
      const std::string message = refusal(s, *arch);
      EXPECT_TRUE(message.starts_with(
          "gradient_kernels = fused is not supported under precision 'dv16': one kernel forms dQ "
          "and dV both in INT8 ('six-of-seven' or 'qk16'), or both in 16 bits ('gradients16' "
          "without 'deterministic')"))
          << message;
    }
}

/// An option that is passed already is no remedy.
TEST(Advice, WideHeadsIn99KbAreToldWhatToChange) {
  AttentionSpec s;
  s.head_dim = 256;
  const auto advice = [&](Precision precision, Granularity granularity) {
    s.precision = precision, s.granularity = granularity;
    const std::string message = refusal(s, find_arch("sm_89"));
    const size_t from = message.find("; take ");
    return message.substr(from, message.find(", a head dimension of at most 128", from) - from);
  };
  using enum Precision;
  for (Precision precision : {six_of_seven, gradients16}) {
    EXPECT_EQ(advice(precision, Granularity::block), "; take granularity 'row'");
    EXPECT_EQ(refusal(s = {.head_dim = 256, .precision = precision}, find_arch("sm_89")), "");
  }
  for (Precision precision : {dv16, qk16}) {
    EXPECT_EQ(advice(precision, Granularity::row),
              "; take precision 'six-of-seven' or 'gradients16'");
    EXPECT_EQ(advice(precision, Granularity::block),
              "; take precision 'six-of-seven' or 'gradients16' with granularity 'row'");
  }
}

} // namespace
