//===- spec_list.cpp - A file that lists operations ------------------------===//

#include "tools/spec_list.h"
#include "tools/spec_options.h"

#include "llvm/ADT/SmallString.h"
#include "llvm/Support/ConvertUTF.h"
#include "llvm/Support/SourceMgr.h"
#include "llvm/Support/YAMLParser.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>

namespace sagebwd::tools {

namespace {

namespace yaml = llvm::yaml;

/// Beyond this the list is a mistake: no two operations of a file need be equal, and there are not
/// so many.
constexpr size_t kMostOperations = 50000;

struct Word {
  std::string text;
  unsigned line;
};
/// The words under one key.
struct Value {
  std::vector<Word> words;
  unsigned line;
};
/// One mapping of the file.
struct Entry {
  std::map<std::string, Value> values;
  unsigned line;
};

//===--- From YAML to words -----------------------------------------------===//

/// The parser recurses: a list nested half a million deep must not end the process. Nothing here
/// nests deeper than an entry's list of words, so a few levels are plenty. Brackets in strings and
/// comments count too: too careful by a little. Nesting by indentation costs a column each.
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

  std::vector<Entry> entries() {
    std::vector<Entry> entries;
    bool first = true;
    for (yaml::document_iterator document = stream_->begin(); document != stream_->end();
         ++document) {
      check();
      yaml::Node* root = document->getRoot();
      check();
      if (!root || !first)
        fail(root ? line_of(*root) : 1, "one document is taken: no '---' between specs");
      first = false;
      if (auto* list = llvm::dyn_cast<yaml::SequenceNode>(root)) {
        for (yaml::Node& item : *list)
          entries.push_back(entry(item));
      } else if (!llvm::isa<yaml::NullNode>(root)) {
        entries.push_back(entry(*root));
      }
      check();
    }
    check();
    if (entries.empty())
      fail(1, "it holds no specs");
    return entries;
  }

  [[noreturn]] void fail(unsigned line, const std::string& what) const {
    throw UsageError(file_ + ":" + std::to_string(line) + ": " + what);
  }

private:
  /// The stream says nothing where it fails but through the handler.
  void check() const {
    if (!error_.empty())
      throw UsageError(error_);
    if (stream_->failed())
      throw UsageError(file_ + " is neither YAML nor JSON");
  }

  unsigned line_of(const yaml::Node& node) const {
    const llvm::SMLoc start = node.getSourceRange().Start;
    return start.isValid() && sources_.FindBufferContainingLoc(start)
               ? sources_.getLineAndColumn(start).first
               : 1;
  }

  Word word(yaml::Node* node, const std::string& where, unsigned line) {
    check();
    auto* scalar = llvm::dyn_cast_or_null<yaml::ScalarNode>(node);
    if (!scalar) {
      if (node && llvm::isa<yaml::AliasNode>(node))
        fail(line, "anchors and aliases are not taken; write the words out");
      fail(line, where + " takes a word or a list of words");
    }
    llvm::SmallString<32> storage;
    return {scalar->getValue(storage).str(), line_of(*scalar)};
  }

  Entry entry(yaml::Node& node) {
    check();
    auto* mapping = llvm::dyn_cast<yaml::MappingNode>(&node);
    if (!mapping)
      fail(line_of(node), "a spec is a mapping, such as {arch: sm_90a, head_dim: 128}");
    Entry entry{{}, line_of(node)};
    for (yaml::KeyValueNode& pair : *mapping) {
      const Word key = word(pair.getKey(), "a key", entry.line);
      yaml::Node* node = pair.getValue();
      check();
      Value value{{}, key.line};
      if (auto* list = llvm::dyn_cast_or_null<yaml::SequenceNode>(node))
        for (yaml::Node& item : *list)
          value.words.push_back(word(&item, key.text, key.line));
      else
        value.words.push_back(word(node, key.text, key.line));
      check();
      if (value.words.empty())
        fail(key.line, key.text + " has no value");
      if (!entry.values.emplace(key.text, std::move(value)).second)
        fail(key.line, "'" + key.text + "' is given twice");
    }
    return entry;
  }

  std::string file_, error_;
  llvm::SourceMgr sources_;
  std::unique_ptr<yaml::Stream> stream_;
};

//===--- From words to operations -----------------------------------------===//

/// A key: its default words, and what one of its words sets.
struct Key {
  std::string name;
  std::vector<std::string> defaults;
  std::function<void(WantedOperation&, const std::string&)> set;
};

std::vector<Key> make_keys() {
  using W = const std::string&;
  std::vector<Key> keys = {
      {"arch", {}, [](WantedOperation& o, W word) { o.arch = find_arch(word); }}};
  visit_fields(usual<AttentionSpec>(), [&](const Label& label, const auto& usual) {
    const auto found = usual_words().find(label.name);
    keys.push_back(
        {std::string(label.name),
         found != usual_words().end() ? found->second : std::vector<std::string>{value_text(usual)},
         [name = label.name](WantedOperation& o, W word) {
           set_field(o.spec, name, word == "default" ? "0" : word);
         }});
  });
  keys.push_back({"pass", {"forward", "backward"}, [](WantedOperation& o, W word) {
                    (parse_word<Pass>(word) == Pass::forward ? o.forward : o.backward) = true;
                  }});
  return keys;
}

const std::vector<Key>& known_keys() {
  static const std::vector<Key> keys = make_keys();
  return keys;
}

/// Every combination of an entry's words.
std::vector<WantedOperation> operations_of(const Entry& entry, const Reader& reader) {
  WantedOperation none{{}, all_archs().front(), /*forward=*/false, /*backward=*/false};
  std::vector<WantedOperation> operations = {none};
  for (const Key& key : known_keys()) {
    Value value{{}, entry.line};
    if (auto found = entry.values.find(key.name); found != entry.values.end())
      value = found->second;
    else
      for (const std::string& word : key.defaults)
        value.words.push_back({word, entry.line});
    if (value.words.empty())
      reader.fail(entry.line, "a spec needs '" + key.name + "'");

    const bool combines = key.name != "pass"; // the words of `pass` apply together
    std::vector<WantedOperation> product;
    for (size_t i = 0; i < value.words.size(); ++i) {
      const Word& word = value.words[i];
      for (size_t j = 0; j < i; ++j)
        if (value.words[j].text == word.text)
          reader.fail(word.line, key.name + " lists '" + word.text + "' twice");
      for (WantedOperation& operation : operations) {
        WantedOperation more = operation;
        WantedOperation& target = combines ? more : operation;
        try {
          key.set(target, word.text);
        } catch (const SpecError& error) {
          reader.fail(word.line, key.name + ": " + error.what());
        }
        if (combines)
          product.push_back(std::move(more));
      }
    }
    if (combines)
      operations = std::move(product);
    if (operations.size() > kMostOperations)
      reader.fail(entry.line,
                  "these are more than " + std::to_string(kMostOperations) + " operations");
  }
  return operations;
}

} // namespace

std::vector<WantedOperation> parse_spec_list(const std::string& text,
                                             const std::string& file_name) {
  Reader reader(text, file_name);
  std::vector<WantedOperation> operations;
  for (const Entry& entry : reader.entries()) {
    for (const auto& [name, value] : entry.values) {
      std::vector<std::string> known;
      for (const Key& key : known_keys())
        known.push_back(key.name);
      if (std::find(known.begin(), known.end(), name) == known.end())
        reader.fail(value.line, "unknown key '" + name + "'" + suggestion(name, known));
    }
    for (const WantedOperation& operation : operations_of(entry, reader)) {
      try {
        kernels_of({operation});
      } catch (const SpecError& error) {
        reader.fail(entry.line, error.what());
      }
      operations.push_back(operation);
    }
    if (operations.size() > kMostOperations)
      reader.fail(entry.line,
                  "these are more than " + std::to_string(kMostOperations) + " operations");
  }
  return operations;
}

} // namespace sagebwd::tools
