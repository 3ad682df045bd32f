//===- generate.h - Sources from the templates that the user names ----------===//
#pragma once

#include "generator/kernel.h"
#include "generator/templates.h"

#include <string>

namespace sagebwd {

/// The templates in a folder, which SAGEBWD_TEMPLATE_DIR names for their development.
TemplateSource templates_in(std::string folder);

/// emit(), from SAGEBWD_TEMPLATE_DIR where it is set and not empty, else as embedded.
KernelSource generate(const KernelSpec&);

} // namespace sagebwd
