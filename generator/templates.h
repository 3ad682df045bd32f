//===- templates.h - Templates of device code, and their expansion ---------===//
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace sagebwd {

/// The text of every file under templates/, by its path there ("kernels/forward.cuh"). The build
/// generates the function.
const std::map<std::string_view, std::string_view>& embedded_templates();

/// The text of the template at a path under templates/.
using TemplateSource = std::function<std::string(std::string_view path)>;
/// The text of a template that is embedded in the library. Raises SpecError if there is none at the
/// path.
std::string embedded_template(std::string_view path);

/// One text without includes: all files that a template includes, directly or through others, each
/// once, and then the template itself.
std::string expanded(std::string_view path, const TemplateSource&);

} // namespace sagebwd
