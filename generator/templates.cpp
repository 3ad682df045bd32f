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
    std::string text = source_(path);
    if (!text.empty() && !text.ends_with('\n'))
      text += '\n';
    std::string own;
    own.reserve(text.size());
    size_t kept = 0; // what comes from here on is not in `own` yet: lines join it together
    bool after_empty = false;
    for (size_t from = 0, to; from < text.size(); from = to + 1) {
      to = text.find('\n', from);
      const std::string_view line(&text[from], to - from);
      const bool includes = line.starts_with(kInclude);
      if (includes || line == kOnce || (line.empty() && after_empty)) {
        own.append(text, kept, from - kept);
        kept = to + 1;
        if (includes)
          add(line.substr(kInclude.size(), line.rfind('"') - kInclude.size()));
      } else {
        after_empty = line.empty() && own.size() + (from - kept) > 0;
      }
    }
    own.append(text, kept);
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
