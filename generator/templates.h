//===- templates.h - The device code that kernels are put together from ----===//
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace sagebwd {

/// Every file under templates/, by its path there ("kernels/forward.cuh"). Written at build time.
const std::map<std::string_view, std::string_view>& embedded_templates();

/// The text of the template at a path under templates/.
using TemplateSource = std::function<std::string(std::string_view path)>;
/// The ones embedded in the library. Raises SpecError for a path that is none.
std::string embedded_template(std::string_view path);

/// A template after all that it includes and they include, each once: one text without includes.
std::string expanded(std::string_view path, const TemplateSource&);

} // namespace sagebwd
