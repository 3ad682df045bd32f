//===- nearest.cpp - The known word that is nearest to a misspelt one ------===//

#include "generator/nearest.h"

#include <algorithm>
#include <numeric>

namespace sagebwd {
namespace {

/// The number of letters that have to be replaced, added or removed (Levenshtein distance). Two
/// swapped letters count as two.
size_t edits_between(std::string_view from, std::string_view to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < from.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < to.size(); ++j) {
      const size_t replaced = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

} // namespace

std::string nearest(std::string_view given, const std::vector<std::string>& known) {
  std::string best;
  if (given.size() > 100) // nobody misspells a word of that length
    return best;
  size_t least = std::max<size_t>(2, given.size() / 3) + 1;
  for (const std::string& word : known) {
    // Somebody who expects abbreviations types a prefix.
    const bool prefix = given.size() > 2 && word.starts_with(given);
    const size_t apart = std::max(given.size(), word.size()) - std::min(given.size(), word.size());
    if (!prefix && apart >= least) // each letter more is an edit
      continue;
    const size_t edits = prefix ? 0 : edits_between(given, word);
    if (edits < least) {
      best = word;
      least = edits;
    }
  }
  return best;
}

std::string suggestion(std::string_view given, const std::vector<std::string>& known) {
  const std::string near = nearest(given, known);
  return near.empty() ? near : "; did you mean '" + near + "'?";
}

} // namespace sagebwd
