//===- input_options.h - Options that choose random inputs ----------------===//
#pragma once

#include "runtime/reference/named_inputs.h"
#include "tools/options.h"

#include <string>
#include <vector>

namespace sagebwd::tools {

/// The names of all distributions and what they imitate, for the help of a command.
std::string help_of_inputs();

/// The option --inputs. `lists`: it takes several names.
class InputOptions {
public:
  /// `usual`: the default.
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
