//===- templates.cpp - Templates of device code, and their expansion --------===//

#include "generator/templates.h"

#include "generator/spec.h"

#include <set>
#include <vector>

namespace sagebwd {
namespace {

constexpr std::string_view kInclude = "#include \"", kOnce = "#pragma once";

class Expansion {
public:
  explicit Expansion(const TemplateSource& source) : source_(source) {}

  void add(std::string_view path) {
    if (!added_.emplace(path).second)
      return;
    const std::string text = source_(path);
    std::string own;
    for (size_t from = 0, to; from < text.size(); from = to + 1) {
      to = std::min(text.find('\n', from), text.size());
      const std::string_view line(&text[from], to - from);
      if (line.substr(0, kInclude.size()) == kInclude)
        add(line.substr(kInclude.size(), line.rfind('"') - kInclude.size()));
      else if (line != kOnce && !(line.empty() && own.size() > 1 && own.ends_with("\n\n")))
        own.append(line).append("\n");
    }
    if (!own.empty())
      text_ += (text_.empty() ? "" : "\n") + own;
  }
  const std::string& text() const { return text_; }

private:
  const TemplateSource& source_;
  std::set<std::string, std::less<>> added_;
  std::string text_;
};

} // namespace

std::string embedded_template(std::string_view path) {
  const auto at = embedded_templates().find(path);
  if (at == embedded_templates().end())
    throw SpecError("there is no template '" + std::string(path) + "'");
  return std::string(at->second);
}

std::string expanded(std::string_view path, const TemplateSource& source) {
  Expansion expansion(source);
  expansion.add(path);
  return expansion.text();
}

} // namespace sagebwd
