//===- generate.h - Generate a kernel's source ----------------------------===//
#pragma once

#include "generator/emit.h"
#include "generator/kernel.h"
#include "generator/templates.h"
#include "runtime/settings.h"

#include <string>

namespace sagebwd {

/// The templates in a folder; SAGEBWD_TEMPLATE_DIR names one while templates are developed.
TemplateSource templates_in(std::string folder);

/// Gives a kernel a time limit on each wait at a barrier in shared memory (ptx/mbarrier.cuh).
KernelSource with_bounded_waits(KernelSource);

/// Generates with emit(), from the folder SAGEBWD_TEMPLATE_DIR if the variable is set and not
/// empty, else from the embedded templates. Under SAGEBWD_DEBUG_WAITS=1 waits have a time limit.
KernelSource generate(const KernelSpec&);
/// The same with settings of which some variable may be wrong, which settings() would refuse.
KernelSource generate_with(const Settings&, const KernelSpec&);

} // namespace sagebwd
