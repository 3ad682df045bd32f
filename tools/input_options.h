//===- input_options.h - Options that choose random inputs ----------------===//
#pragma once

#include "runtime/reference/named_inputs.h"
#include "tools/options.h"

#include <string>
#include <vector>

namespace sagebwd::tools {

/// Every distribution's name and what it imitates, a line each, for the help of a command.
std::string help_of_inputs();

/// --inputs. `lists`: it takes several names.
class InputOptions {
public:
  /// `usual`: where none is named.
  explicit InputOptions(
      std::vector<reference::Distribution> usual = {reference::Distribution::gaussian})
      : named_(std::move(usual)) {}
  void declare(OptionTable&, bool lists);
  /// Without repeats.
  const std::vector<reference::Distribution>& all() const { return named_; }

private:
  std::vector<reference::Distribution> named_;
};

} // namespace sagebwd::tools
