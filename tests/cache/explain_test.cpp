//===- explain_test.cpp - Which field of a key makes a miss ----------------===//

#include "cache/explain.h"
#include "cache/store.h"
#include "generator/emit.h"
#include "generator/kernel.h"
#include "generator/operation.h"
#include "runtime/driver_needs.h"
#include "runtime/kernels.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

using namespace sagebwd;
using test::TempDirectory;

namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

const Fields kFields = {{"schema", "sagebwd kernel 2"},
                        {"kind", "forward"},
                        {"pass", "forward"},
                        {"head_dim", "128"},
                        {"dtype", "bf16"},
                        {"causal", "none"},
                        {"granularity", "row"},
                        {"precision", "six-of-seven"},
                        {"smooth_k", "yes"},
                        {"rotate", "yes"},
                        {"group_q", "64"},
                        {"group_kv", "64"},
                        {"family", "mma"},
                        {"block_q", "64"},
                        {"block_kv", "64"},
                        {"warps", "4"},
                        {"stages", "1"},
                        {"blocks_per_sm", "2"},
                        {"options", "-std=c++17"},
                        {"arch", "sm_80"},
                        {"source", "0123abcd"}};

Fields with_field(Fields fields, const std::string& label, const std::string& value) {
  for (auto& [name, old] : fields)
    if (name == label)
      old = value;
  return fields;
}

KeptItem kept(const CacheKey& key, const std::string& compiler = "nvrtc 13.0 build 1") {
  KeptItem item;
  item.place = "/cache";
  item.digest = key.digest;
  item.key = key;
  item.name = "k_" + key.digest.substr(0, 8);
  item.arch = key["arch"];
  item.compiler = compiler;
  return item;
}

std::vector<std::string> labels(const std::vector<FieldDifference>& fields) {
  std::vector<std::string> names;
  for (const FieldDifference& field : fields)
    names.push_back(field.label);
  return names;
}

using Labels = std::vector<std::string>;

class EachLabel : public testing::TestWithParam<std::string> {};

TEST_P(EachLabel, IsNamedAloneAlsoWhereOptionsAndSourceFollow) {
  const std::string label = GetParam();
  const CacheKey wanted = make_key(kFields);
  Fields other = with_field(kFields, label, "other");
  const Explanation alone = explain(wanted, {kept(make_key(other))});
  EXPECT_EQ(alone.verdict, Explanation::differs);
  EXPECT_EQ(labels(alone.differences), Labels{label});
  EXPECT_EQ(alone.differences.front().wanted, wanted[label]);
  EXPECT_EQ(alone.differences.front().kept, "other");
  EXPECT_TRUE(alone.following.empty());

  if (label == "source")
    return;
  other = with_field(other, "source", "ffff");
  if (label != "options")
    other = with_field(other, "options", "-std=c++20");
  const Explanation followed = explain(wanted, {kept(make_key(other))});
  EXPECT_EQ(labels(followed.differences), Labels{label});
  EXPECT_NE(to_string(followed).find("whose " + label + " is other, not " + wanted[label]),
            std::string::npos)
      << to_string(followed);
}

INSTANTIATE_TEST_SUITE_P(Explain, EachLabel, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& [label, value] : kFields)
                             names.push_back(label);
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

TEST(Explain, NamesTheCompilerOnlyWhereItCounts) {
  const CacheKey wanted = make_key(kFields);
  const std::vector<KeptItem> items = {kept(wanted, "nvrtc 12.8 build 5")};
  EXPECT_EQ(explain(wanted, items).verdict, Explanation::present);
  EXPECT_EQ(explain(wanted, items, "nvrtc 12.8 build 5").verdict, Explanation::present);
  const Explanation other = explain(wanted, items, "nvrtc 13.0 build 1");
  EXPECT_EQ(other.verdict, Explanation::other_compiler);
  EXPECT_EQ(other.differences, (std::vector<FieldDifference>{
                                   {"compiler", "nvrtc 13.0 build 1", "nvrtc 12.8 build 5"}}));
  EXPECT_NE(to_string(other).find("SAGEBWD_RECOMPILE=1"), std::string::npos);
}

TEST(Explain, NamesAFieldThatOnlyOneKeyHas) {
  Fields fewer = kFields;
  std::erase_if(fewer, [](const auto& field) { return field.first == "rotate"; });
  const Explanation e = explain(make_key(kFields), {kept(make_key(fewer))});
  EXPECT_EQ(e.differences, (std::vector<FieldDifference>{{"rotate", "yes", ""}}));
  EXPECT_NE(to_string(e).find("rotate is none, not yes"), std::string::npos);
}

TEST(Explain, NamesEveryFieldThatNoOtherExplains) {
  const Fields other = with_field(
      with_field(with_field(kFields, "dtype", "fp16"), "arch", "sm_90a"), "block_q", "9");
  const Explanation e = explain(make_key(kFields), {kept(make_key(other))});
  EXPECT_EQ(labels(e.differences), (Labels{"arch", "dtype"}));
  EXPECT_EQ(labels(e.following), Labels{"block_q"});
  EXPECT_EQ(
      labels(explain(make_key(kFields),
                     {kept(make_key(with_field(with_field(kFields, "warps", "8"), "stages", "2")))})
                 .differences),
      (Labels{"stages", "warps"}));
}

TEST(Explain, TakesTheEntryOfTheFewestDifferencesWhateverTheOrder) {
  const CacheKey wanted = make_key(kFields);
  std::vector<KeptItem> items = {
      kept(make_key(with_field(with_field(kFields, "dtype", "fp16"), "head_dim", "64"))),
      kept(make_key(with_field(kFields, "stages", "2"))),
      kept(make_key(with_field(kFields, "kind", "backward_dq"))),
      kept(make_key(with_field(kFields, "head_dim", "64"))),
  };
  const std::vector<Labels> expected = {{"stages"}, {"head_dim"}, {"kind"}, {"dtype", "head_dim"}};
  for (const Labels& nearest : expected) { // and then without it
    std::sort(items.begin(), items.end(),
              [](const KeptItem& a, const KeptItem& b) { return a.digest < b.digest; });
    const Explanation forth = explain(wanted, items);
    std::reverse(items.begin(), items.end());
    const Explanation back = explain(wanted, items);
    EXPECT_EQ(labels(forth.differences), nearest);
    EXPECT_EQ(back.item.name, forth.item.name);
    std::erase_if(items, [&](const KeptItem& item) { return item.name == forth.item.name; });
  }
  EXPECT_EQ(explain(wanted, items).verdict, Explanation::nothing);
}

TEST(Explain, BreaksTiesByNameThenDigest) {
  const CacheKey wanted = make_key(kFields);
  KeptItem a = kept(make_key(with_field(kFields, "stages", "2")));
  KeptItem b = kept(make_key(with_field(kFields, "stages", "3")));
  for (bool swapped : {false, true}) {
    a.name = swapped ? "z" : "a", b.name = "k";
    EXPECT_EQ(explain(wanted, {a, b}).item.name, swapped ? "k" : "a");
    EXPECT_EQ(explain(wanted, {b, a}).item.name, swapped ? "k" : "a");
  }
  a.name = b.name;
  EXPECT_EQ(explain(wanted, {a, b}).differences, explain(wanted, {b, a}).differences);
}

TEST(Explain, SaysWhichLayerHasIt) {
  const CacheKey wanted = make_key(kFields);
  KeptItem file = kept(wanted), item = kept(wanted);
  item.place = "/kernels.pack";
  item.in_pack = true;
  EXPECT_EQ(to_string(explain(wanted, {file, item})), "in /cache");
  EXPECT_EQ(to_string(explain(wanted, {item})), "in /kernels.pack");

  file.problem = "it is truncated"; // the pack's is taken
  const Explanation healed = explain(wanted, {file, item});
  EXPECT_EQ(healed.verdict, Explanation::present);
  EXPECT_EQ(healed.item.place, "/kernels.pack");
  EXPECT_NE(to_string(healed).find("the directory's own is bad: it is truncated"),
            std::string::npos);
  const Explanation bad = explain(wanted, {file});
  EXPECT_EQ(bad.verdict, Explanation::bad);
  EXPECT_EQ(to_string(bad), "in /cache, but bad: it is truncated; the next use replaces it");
  item.problem = "its checksum does not match"; // an error at run time, so not a later pack's
  EXPECT_EQ(explain(wanted, {item, kept(wanted)}).verdict, Explanation::bad);
  // Others that are bad say nothing, and records are no kernels.
  KeptItem other = kept(make_key(with_field(kFields, "stages", "2")));
  other.problem = "it is truncated";
  KeptItem record = kept(make_key(with_field(kFields, "stages", "3")));
  record.kernel = false;
  EXPECT_EQ(explain(wanted, {other, record}).verdict, Explanation::nothing);
}

//===--- Of real kernels, through real files -------------------------------===//

KernelSpec forward_kernel(const AttentionSpec& spec, const char* arch = "sm_80") {
  for (const KernelSpec& kernel : Operation(resolved(spec), find_arch(arch)).kernels(Pass::forward))
    if (kernel.kind == KernelKind::forward)
      return kernel;
  throw std::logic_error("no forward kernel");
}

CacheKey key_of(const KernelSpec& kernel) { return sagebwd::key_of(emit(kernel), kernel); }

void publish(CacheStore& store, const KernelSpec& kernel) {
  CacheEntry entry;
  entry.kernel_name = kernel_name(kernel);
  entry.arch = kernel.arch.name;
  entry.compiler = "nvrtc 13.0 build 1";
  entry.lowest_driver = 13000;
  entry.cubin = "cubin";
  ASSERT_TRUE(store.publish(key_of(kernel), entry));
}

std::vector<KeptItem> items_in(const std::string& directory) {
  std::vector<KeptItem> items;
  for (const KeptName& name : kept_names(directory))
    if (std::optional<KeptItem> item = read_kept(name))
      items.push_back(std::move(*item));
  return items;
}

struct Variant {
  const char* label;
  std::function<void(KernelSpec&)> change;
};

KernelSpec of(AttentionSpec spec, const char* arch = "sm_80") { return forward_kernel(spec, arch); }

class RealSpecs : public testing::TestWithParam<Variant> {};

TEST_P(RealSpecs, DifferInTheFieldThatWasChanged) {
  KernelSpec wanted = forward_kernel({});
  KernelSpec other = wanted;
  GetParam().change(other);
  TempDirectory temp;
  CacheStore store(temp / "cache");
  publish(store, other);
  const std::vector<KeptItem> items = items_in(store.directory());
  ASSERT_EQ(items.size(), 1u);
  const Explanation e = explain(key_of(wanted), items);
  EXPECT_EQ(labels(e.differences), Labels{GetParam().label}) << to_string(e);
  EXPECT_EQ(explain(key_of(other), items).verdict, Explanation::present);
}

INSTANTIATE_TEST_SUITE_P(
    Explain, RealSpecs,
    testing::Values(
        Variant{"head_dim", [](KernelSpec& k) { k = of({.head_dim = 64}); }},
        Variant{"dtype", [](KernelSpec& k) { k = of({.dtype = DType::fp16}); }},
        Variant{"causal", [](KernelSpec& k) { k = of({.causal = Causal::top_left}); }},
        Variant{"granularity", [](KernelSpec& k) { k = of({.granularity = Granularity::block}); }},
        Variant{"precision", [](KernelSpec& k) { k = of({.precision = Precision::qk16}); }},
        Variant{"smooth_k", [](KernelSpec& k) { k.attention.smooth_k = false; }},
        Variant{"rotate", [](KernelSpec& k) { k = of({.rotate = false}); }},
        Variant{"arch", [](KernelSpec& k) { k = of({}, "sm_90a"); }},
        Variant{"group_kv", [](KernelSpec& k) { k = of({.group_kv = 64}); }},
        Variant{"sink_keys", [](KernelSpec& k) { k = of({.sink_keys = 0}); }},
        Variant{"stages", [](KernelSpec& k) { k.tile.stages = 2; }},
        Variant{"blocks_per_sm", [](KernelSpec& k) { k.tile.blocks_per_sm = 1; }}),
    [](const auto& info) { return std::string(info.param.label); });

TEST(Explain, NamesAllOfARealTileAndKindThatDiffer) {
  auto differing = [](const KernelSpec& wanted, const KernelSpec& there) {
    TempDirectory temp;
    CacheStore store(temp / "cache");
    publish(store, there);
    return labels(explain(key_of(wanted), items_in(store.directory())).differences);
  };
  KernelSpec wide = of({});
  wide.tile = {Family::mma, 128, 128, 8, 1, 1}; // queries and warps go together
  EXPECT_EQ(differing(of({}), wide), (Labels{"block_q", "blocks_per_sm", "warps"}));
  const Operation operation(resolved(AttentionSpec()), find_arch("sm_80"));
  const std::vector<KernelSpec> kernels = operation.kernels(Pass::backward);
  const KernelSpec dq = *std::find_if(kernels.begin(), kernels.end(), [](const KernelSpec& k) {
    return k.kind == KernelKind::backward_dq;
  });
  EXPECT_EQ(differing(of({}), dq), (Labels{"kind", "pass"}));
  KernelSpec mma = of({.group_kv = 64}, "sm_90a");
  mma.tile = parse_tile("wgmma 64x64 w4 s1 b3");
  const KernelSpec wgmma = mma;
  mma.tile.family = Family::mma;
  EXPECT_EQ(differing(wgmma, mma), Labels{"family"});
}

TEST(Inventory, ReadsWithoutTouching) {
  TempDirectory temp;
  CacheStore store(temp / "cache");
  const KernelSpec kernel = forward_kernel({});
  publish(store, kernel);
  const std::string file = store.directory() + "/" + key_of(kernel).digest + ".kernel";
  namespace fs = std::filesystem;
  const auto old = fs::last_write_time(file) - std::chrono::hours(100);
  fs::last_write_time(file, old);
  EXPECT_EQ(items_in(store.directory()).front().name, kernel_name(kernel));
  EXPECT_EQ(fs::last_write_time(file), old);

  test::write_text(file, test::read_text(file) + "x");
  std::vector<KeptItem> items = items_in(store.directory());
  EXPECT_NE(items.front().problem, "");
  EXPECT_TRUE(fs::exists(file));
  EXPECT_EQ(explain(key_of(kernel), items).verdict, Explanation::bad);

  fs::permissions(file, fs::perms::others_write, fs::perm_options::add);
  EXPECT_EQ(items_in(store.directory()).front().problem,
            "other users may write it; run: chmod go-w '" + file + "'");
  fs::remove(file);
  fs::create_symlink("/etc/passwd", file);
  EXPECT_EQ(items_in(store.directory()).front().problem, "it is a symbolic link");
  fs::remove(file);
  fs::create_directory(file);
  EXPECT_EQ(items_in(store.directory()).front().problem, "it is a directory");
}

TEST(Inventory, SaysWhichKernelsADriverIsTooOldFor) {
  const DriverNeeds needs = {{{"sm_80", 12000}, 3}, {{"sm_90a", 13000}, 2}, {{"sm_120", 12080}, 1}};
  const std::vector<std::string> archs = {"sm_80", "sm_90a"};
  EXPECT_EQ(driver_warning(needs, "P", archs, 13000), "");
  EXPECT_EQ(driver_warning(needs, "P", {"sm_80"}, 12000), "");
  EXPECT_EQ(driver_warning(needs, "P", archs, 12080),
            "2 kernels in P need a driver for CUDA 13.0 or newer; this one is for CUDA 12.8");
  EXPECT_EQ(driver_warning(needs, "P", {"sm_120"}, 12040),
            "1 kernel in P needs a driver for CUDA 12.8 or newer; this one is for CUDA 12.4");
}

TEST(Inventory, SummarizesAPack) {
  TempDirectory temp;
  CacheStore store(temp / "cache");
  publish(store, forward_kernel({}));
  publish(store, forward_kernel({}, "sm_90a"));
  std::vector<std::string> items;
  for (const KeptName& name : kept_names(store.directory())) {
    items.emplace_back();
    ASSERT_TRUE(read_kept(name, &items.back()));
  }
  write_pack(temp / "a.pack", items);
  const PackSummary summary = summarize(*Pack::open(temp / "a.pack"));
  EXPECT_EQ(summary.kernels, 2u);
  EXPECT_EQ(summary.records, 0u);
  EXPECT_EQ(summary.archs, (std::vector<std::string>{"sm_80", "sm_90a"}));
  EXPECT_EQ(summary.lowest_driver, 13000);
  const auto all = [](const CacheKey&) { return true; };
  const DriverNeeds needs = {{{"sm_80", 13000}, 1}, {{"sm_90a", 13000}, 1}};
  EXPECT_EQ(driver_needs(store.directory(), all), needs);
  EXPECT_EQ(driver_needs(store.directory(), [](const CacheKey& k) { return k["arch"] == "sm_80"; }),
            (DriverNeeds{{{"sm_80", 13000}, 1}}));
  size_t next = 0; // both are sorted by digest
  for (const KeptName& name : kept_names(Pack::open(temp / "a.pack"))) {
    const std::optional<KeptItem> item = read_kept(name);
    ASSERT_TRUE(item);
    EXPECT_EQ(item->problem, "");
    EXPECT_TRUE(item->in_pack);
    EXPECT_EQ(item->bytes, items[next++].size());
  }
}

} // namespace
