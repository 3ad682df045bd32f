//===- generate.h - Sources from the templates that the user names ----------===//
#pragma once

#include "generator/emit.h"
#include "generator/kernel.h"
#include "generator/templates.h"

#include <string>

namespace sagebwd {

/// The templates in a folder, which SAGEBWD_TEMPLATE_DIR names for their development.
TemplateSource templates_in(std::string folder);

/// The same kernel, whose waits at barriers in shared memory have a bound (ptx/mbarrier.cuh).
KernelSource with_bounded_waits(KernelSource);

/// emit(), from SAGEBWD_TEMPLATE_DIR where it is set and not empty, else as embedded; with bounded
/// waits under SAGEBWD_DEBUG_WAITS=1.
KernelSource generate(const KernelSpec&);

} // namespace sagebwd
