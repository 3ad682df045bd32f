//===- input_options.cpp - Options that choose random inputs --------------===//
#include "tools/input_options.h"

#include "tools/console.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringRef.h"

#include <algorithm>

namespace sagebwd::tools {

using reference::Distribution;

std::string help_of_inputs() {
  size_t widest = 0;
  for (const auto& [distribution, name] : Words<Distribution>::all)
    widest = std::max(widest, name.size());
  std::string lines = "inputs:\n";
  for (const auto& [distribution, name] : Words<Distribution>::all)
    lines += "  " + std::string(name) + std::string(widest + 2 - name.size(), ' ') +
             wrapped(std::string(reference::facts_of(distribution).text), widest + 4) + "\n";
  return lines;
}

void InputOptions::declare(OptionTable& options, bool lists) {
  const auto read = [this, lists](const std::string& given) {
    llvm::SmallVector<llvm::StringRef> names;
    llvm::StringRef(given).split(names, ',');
    if (!lists && names.size() > 1)
      throw UsageError("--inputs is '" + given + "'; it takes one name");
    named_.clear();
    for (const llvm::StringRef name : names)
      if (const auto found = parse_word<Distribution>(name.str());
          !llvm::is_contained(named_, found))
        named_.push_back(found);
  };
  options.word("inputs", lists ? "NAME,.." : "NAME", read,
               "kind of random inputs, see the list above (default " +
                   joined(named_, ",", to_string<Distribution>) + ")");
  options.offer(words_of<Distribution>());
}

} // namespace sagebwd::tools
