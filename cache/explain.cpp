//===- explain.cpp - Explain why a kernel is not in the cache -------------===//

#include "cache/explain.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>

namespace sagebwd {

namespace {

/// Ranks of fields. A field of a later rank has a default that depends on fields of earlier ranks,
/// or follows from them.
enum Rank : size_t { kSpec, kGroups, kTile, kDerived, kRanks };

Rank rank_of(const std::string& label) {
  if (label == "group_q" || label == "group_kv" || label == "sink_keys")
    return kGroups;
  if (label == "family" || label == "block_q" || label == "block_kv" || label == "warps" ||
      label == "stages" || label == "blocks_per_sm")
    return kTile;
  if (label == "options" || label == "source")
    return kDerived;
  return kSpec; // also schema, arch, and fields that a later version adds
}

std::vector<FieldDifference> differences(const CacheKey& wanted, const CacheKey& kept) {
  std::map<std::string, FieldDifference> all;
  for (const auto& [label, value] : wanted.fields)
    all[label].wanted = value;
  for (const auto& [label, value] : kept.fields)
    all[label].kept = value;
  std::vector<FieldDifference> differing;
  for (auto& [label, values] : all)
    if (values.wanted != values.kept)
      differing.push_back({label, std::move(values.wanted), std::move(values.kept)});
  return differing;
}

/// The distance of an item from the wanted key; smaller is nearer. Differences of earlier ranks
/// weigh more, because they cause differences of later ranks.
auto distance_of(const CacheKey& wanted, const KeptItem& item) {
  std::array<size_t, kRanks> fields{};
  bool other_kind = false;
  for (const FieldDifference& field : differences(wanted, item.key)) {
    ++fields[rank_of(field.label)];
    other_kind |= field.label == "kind";
  }
  return std::tuple(fields[kSpec], other_kind, fields[kGroups], fields[kTile], fields[kDerived],
                    item.name, item.arch, item.digest);
}

/// Sorts the differing fields into those that made the difference and those that may follow from
/// them.
void sort_out(std::vector<FieldDifference> fields, Explanation& explanation) {
  size_t first = kRanks;
  std::set<std::string> labels;
  for (const FieldDifference& field : fields) {
    first = std::min<size_t>(first, rank_of(field.label));
    labels.insert(field.label);
  }
  auto follows = [&](const std::string& label) {
    return rank_of(label) > first ||
           // Other options also change the source.
           (label == "source" && labels.count("options")) ||
           (label == "rotate" && labels.count("precision")); // under qk16 nothing is rotated
  };
  for (FieldDifference& field : fields)
    (follows(field.label) ? explanation.following : explanation.differences)
        .push_back(std::move(field));
}

std::string listed(const std::vector<FieldDifference>& fields) {
  auto shown = [](const std::string& value) { return value.empty() ? "none" : value; };
  std::string text;
  for (const FieldDifference& field : fields) {
    text += text.empty() ? "" : " and ";
    if (field.label == "source")
      text += "source is another one (the templates or the generator changed)";
    else
      text += field.label + " is " + shown(field.kept) + ", not " + shown(field.wanted);
  }
  return text;
}

} // namespace

Explanation explain(const CacheKey& wanted, const std::vector<KeptItem>& kept,
                    const std::string& compiler) {
  Explanation explanation;
  const KeptItem* nearest = nullptr;
  std::optional<decltype(distance_of(wanted, kept.front()))> least;
  for (const KeptItem& item : kept) {
    if (!item.kernel)
      continue;
    if (item.digest == wanted.digest) {
      if (!item.problem.empty()) {
        explanation.verdict = Explanation::bad;
        explanation.problem = item.problem;
        explanation.item = item;
        if (item.in_pack)
          return explanation; // a bad pack is an error, so later packs are not read
        continue;
      }
      explanation.item = item;
      explanation.verdict = Explanation::present;
      if (!compiler.empty() && item.compiler != compiler) {
        explanation.verdict = Explanation::other_compiler;
        explanation.differences = {{"compiler", compiler, item.compiler}};
      }
      return explanation;
    }
    if (!item.problem.empty())
      continue;
    if (auto distance = distance_of(wanted, item); !least || distance < *least) {
      nearest = &item;
      least = std::move(distance);
    }
  }
  if (explanation.verdict == Explanation::bad || !nearest)
    return explanation;
  explanation.verdict = Explanation::differs;
  explanation.item = *nearest;
  sort_out(differences(wanted, nearest->key), explanation);
  return explanation;
}

std::string to_string(const Explanation& e) {
  switch (e.verdict) {
  case Explanation::present:
    return "in " + e.item.place +
           (e.problem.empty() ? "" : "; the directory's own is bad: " + e.problem);
  case Explanation::other_compiler:
    return "in " + e.item.place + ", but compiled by '" + e.differences.front().kept + "', and '" +
           e.differences.front().wanted + "' is asked for (SAGEBWD_RECOMPILE=1)";
  case Explanation::bad:
    return "in " + e.item.place + ", but bad: " + e.problem +
           (e.item.in_pack ? "; copy or build the pack again" : "; the next use replaces it");
  case Explanation::nothing:
    return "not kept, nor is any other kernel";
  case Explanation::differs:
    break;
  }
  std::string text = "not kept; nearest: " + e.item.name + " (" + e.item.arch + ") in " +
                     e.item.place + ", whose " + listed(e.differences);
  std::string following;
  for (const FieldDifference& field : e.following)
    following += (following.empty() ? "" : ", ") + field.label;
  return following.empty() ? text : text + " (and, with it, " + following + ")";
}

} // namespace sagebwd
