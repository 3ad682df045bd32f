//===- spec_list.cpp - A file that lists operations ------------------------===//
//
// The parser's nodes are read here, and not by LLVM's traits for YAML, because errors name lines
// and repeated keys, which traits do not report.
//
//===----------------------------------------------------------------------===//

#include "tools/spec_list.h"
#include "tools/spec_options.h"

#include "llvm/ADT/SmallString.h"
#include "llvm/Support/ConvertUTF.h"
#include "llvm/Support/SourceMgr.h"
#include "llvm/Support/YAMLParser.h"

#include <algorithm>
#include <memory>

namespace sagebwd::tools {

namespace {

namespace yaml = llvm::yaml;

/// A list with more operations is a mistake: there are not so many different ones.
constexpr size_t kMostOperations = 50000;

/// A key or one of its values.
struct Word {
  std::string text;
  unsigned line;
};

/// The parser is recursive, and deep nesting must not end the process. An entry's list of words is
/// the deepest level that is needed. Brackets in strings and comments are counted too, which errs
/// on the safe side. Nesting by indentation takes one column per level.
bool too_deep(const std::string& text) {
  constexpr int kDeepest = 16;
  int open = 0, dashes = 0;
  bool indent = true;
  for (char c : text) {
    open += (c == '[' || c == '{') - (c == ']' || c == '}');
    if (c == '\n' || c == '\r') {
      indent = true;
      dashes = 0;
    } else if (indent && c != ' ' && c != '\t') {
      ++dashes; // "- - - x" nests in one line; "? " and ": " nest likewise
      indent = c == '-' || c == '?' || c == ':';
    }
    if (open > kDeepest || dashes > kDeepest)
      return true;
  }
  return false;
}

std::vector<std::string> known_keys() {
  std::vector<std::string> keys = {"arch"};
  visit_fields(usual<AttentionSpec>(),
               [&](const Label& label, const auto&) { keys.emplace_back(label.name); });
  keys.push_back("pass");
  return keys;
}

/// Raises SpecError for a word that is not a value of the key.
void check_word(const std::string& key, const std::string& word) {
  if (AttentionSpec spec; key == "arch")
    parse_archs({word});
  else if (key == "pass")
    parse_word<Pass>(word);
  else
    set_field(spec, key, word == "default" ? "0" : word);
}

class Reader {
public:
  Reader(const std::string& text, const std::string& file_name) : file_(file_name) {
    if (text.size() > kLongestSpecList)
      throw UsageError(file_ + " has more than " + std::to_string(kLongestSpecList >> 10) +
                       " KiB: it is no list of specs");
    size_t line = 1;
    for (char c : text) {
      line += c == '\n';
      if (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\r' && c != '\t')
        fail(static_cast<unsigned>(line), "a control character: it is no YAML text");
    }
    auto* begin = reinterpret_cast<const llvm::UTF8*>(text.data());
    if (!llvm::isLegalUTF8String(&begin, begin + text.size()))
      throw UsageError(file_ + " is no UTF-8 text");
    if (too_deep(text))
      throw UsageError(file_ + " nests too deeply: it is a list of mappings of words or lists");
    sources_.setDiagHandler(
        [](const llvm::SMDiagnostic& diagnostic, void* self) {
          auto& reader = *static_cast<Reader*>(self);
          if (reader.error_.empty())
            reader.error_ = reader.file_ + ":" +
                            std::to_string(std::max(1, diagnostic.getLineNo())) + ": " +
                            diagnostic.getMessage().str();
        },
        this);
    stream_ = std::make_unique<yaml::Stream>(text, sources_, /*ShowColors=*/false);
  }

  std::vector<WantedOperation> operations() {
    std::vector<WantedOperation> operations;
    const auto add = [&](yaml::Node& entry) {
      const unsigned line = line_of(entry);
      for (WantedOperation& operation : operations_of(entry))
        operations.push_back(std::move(operation));
      check_count(operations.size(), line);
    };
    bool first = true;
    for (yaml::document_iterator document = stream_->begin(); document != stream_->end();
         ++document) {
      check();
      yaml::Node* root = document->getRoot();
      check();
      if (!root || !first)
        fail(root ? line_of(*root) : 1, "one document is taken: no '---' between specs");
      first = false;
      check_plain(*root);
      if (auto* list = llvm::dyn_cast<yaml::SequenceNode>(root))
        for (yaml::Node& item : *list)
          add(item);
      else if (!llvm::isa<yaml::NullNode>(root))
        add(*root);
      check();
    }
    check();
    if (operations.empty())
      fail(1, "it holds no specs, such as {arch: sm_90a, head_dim: 128}; prebuild --help has more");
    return operations;
  }

private:
  /// The stream reports errors only through the handler.
  void check() const {
    if (!error_.empty())
      throw UsageError(error_);
    if (stream_->failed())
      throw UsageError(file_ + " is neither YAML nor JSON");
  }

  unsigned line_of(const yaml::Node& node) const {
    const auto* alias =
        llvm::dyn_cast<yaml::AliasNode>(&node); // its range is that of the next node
    const llvm::SMLoc start =
        alias ? llvm::SMLoc::getFromPointer(alias->getName().data()) : node.getSourceRange().Start;
    return start.isValid() && sources_.FindBufferContainingLoc(start)
               ? sources_.getLineAndColumn(start).first
               : 1;
  }

  [[noreturn]] void fail(unsigned line, const std::string& what) const {
    throw UsageError(file_ + ":" + std::to_string(line) + ": " + what);
  }

  void check_count(size_t operations, unsigned line) const {
    if (operations > kMostOperations)
      fail(line, "these are more than " + std::to_string(kMostOperations) + " operations");
  }

  /// Refuses what YAML has besides words, lists and mappings.
  void check_plain(const yaml::Node& node) const {
    if (llvm::isa<yaml::AliasNode>(node))
      fail(line_of(node), "anchors and aliases are not taken; write the words out");
    if (const std::string tag = node.getRawTag().str(); !tag.empty())
      fail(line_of(node), "tags are not taken; leave '" + tag + "' out");
  }

  Word word(yaml::Node* node, const Word& where) {
    check();
    if (node)
      check_plain(*node);
    auto* scalar = llvm::dyn_cast_or_null<yaml::ScalarNode>(node);
    if (!scalar)
      fail(where.line, where.text + " takes a word or a list of words");
    llvm::SmallString<32> storage;
    return {scalar->getValue(storage).str(), line_of(*scalar)};
  }

  /// The words of a key: each is known and given once.
  std::vector<std::string> values(yaml::Node* node, const Word& key) {
    std::vector<std::string> values;
    const auto add = [&](yaml::Node* item) {
      const Word value = word(item, key);
      if (std::find(values.begin(), values.end(), value.text) != values.end())
        fail(value.line, key.text + " lists '" + value.text + "' twice");
      if (value.text.find('\n') != std::string::npos)
        fail(value.line, key.text + " has a value of more than one line: is a ']' missing?");
      values.push_back(value.text);
      try {
        check_word(key.text, value.text);
      } catch (const SpecError& error) {
        const std::string what = error.what(); // for a number it names the field
        fail(value.line, (what.rfind(key.text, 0) == 0 ? "" : key.text + ": ") + what);
      }
    };
    check();
    if (node)
      check_plain(*node);
    if (auto* list = llvm::dyn_cast_or_null<yaml::SequenceNode>(node))
      for (yaml::Node& item : *list)
        add(&item);
    else
      add(node);
    check();
    if (values.empty())
      fail(key.line, key.text + " has no value");
    return values;
  }

  /// Every combination of one mapping's words.
  std::vector<WantedOperation> operations_of(yaml::Node& node) {
    check();
    check_plain(node);
    auto* mapping = llvm::dyn_cast<yaml::MappingNode>(&node);
    if (!mapping)
      fail(line_of(node), "a spec is a mapping, such as {arch: sm_90a, head_dim: 128}");
    const Word spec{"a key", line_of(node)};
    SpecWords words;
    for (yaml::KeyValueNode& pair : *mapping) {
      const Word key = word(pair.getKey(), spec);
      const std::vector<std::string> known = known_keys();
      if (std::find(known.begin(), known.end(), key.text) == known.end())
        fail(key.line, "unknown key '" + key.text + "'" + suggestion(key.text, known));
      if (words.count(key.text))
        fail(key.line, "'" + key.text + "' is given twice");
      words[key.text] = values(pair.getValue(), key);
    }
    check();
    if (!words.count("arch"))
      fail(spec.line, "a spec needs 'arch'");
    words.insert(usual_words().begin(), usual_words().end()); // for keys that are left out
    size_t count = 1;
    for (auto& [key, values] : words) {
      check_count(count *= key == "pass" ? 1 : values.size(), spec.line);
      std::replace(values.begin(), values.end(), std::string("default"), std::string("0"));
    }
    const auto serves = [&](Pass pass) {
      const std::vector<std::string>& passes = words["pass"];
      return passes.empty() || std::count(passes.begin(), passes.end(), to_string(pass)) > 0;
    };
    std::vector<WantedOperation> operations;
    for (const Arch& arch : parse_archs(words["arch"]))
      for (const AttentionSpec& spec_of_words : combinations(words))
        operations.push_back({spec_of_words, arch, serves(Pass::forward), serves(Pass::backward)});
    for (const WantedOperation& operation : operations)
      try {
        resolved(operation.spec);
      } catch (const SpecError& error) {
        fail(spec.line, error.what());
      }
    return operations;
  }

  std::string file_, error_;
  llvm::SourceMgr sources_;
  std::unique_ptr<yaml::Stream> stream_;
};

} // namespace

std::vector<WantedOperation> parse_spec_list(const std::string& text,
                                             const std::string& file_name) {
  return Reader(text, file_name).operations();
}

} // namespace sagebwd::tools
