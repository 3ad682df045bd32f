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
  void declare(OptionTable&, bool lists);
  /// Without repeats. Gaussian alone where none is named.
  const std::vector<reference::Distribution>& all() const { return named_; }

private:
  std::vector<reference::Distribution> named_ = {reference::Distribution::gaussian};
};

} // namespace sagebwd::tools
