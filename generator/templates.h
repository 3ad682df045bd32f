//===- templates.h - The device code embedded in the library ---------------===//
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace sagebwd {

/// Every file under templates/, by its path there ("kernels/forward.cuh"). Written at build time.
const std::map<std::string_view, std::string_view>& embedded_templates();

/// One template. SAGEBWD_TEMPLATE_DIR, for development, names a folder to read instead.
std::string template_text(std::string_view path);

} // namespace sagebwd
