//===- ptx_loops.cpp - Counting matrix products in the loops of PTX ---------===//
//
// PTX is split into basic blocks; natural loops are found from the edges that lead back to a block
// on the current path. Within a loop every way from its head back to it must meet the same
// products: then "per pass" is one number.
//
//===----------------------------------------------------------------------===//

#include "tests/templates/ptx_loops.h"

#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Support/Regex.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <vector>

namespace sagebwd::test {

namespace {

struct Block {
  Products products;
  std::vector<std::string> lines;
  std::vector<int> next;
};

using Nodes = std::set<int>;

bool starts_with(const std::string& text, const std::string& prefix) {
  return text.rfind(prefix, 0) == 0;
}

class Counter {
public:
  Counter(const std::string& ptx, bool wgmma, const std::string& element)
      : wgmma_(wgmma), element_(element) {
    split(ptx);
    find_loops();
  }
  LoopProducts count();

private:
  Products products_of(const std::string& line) const;
  void split(const std::string& ptx);
  void find_loops();
  int trips(int head) const;
  Products per_pass(int head);
  Products to_end_of_pass(int block, int head, std::map<int, Products>& known);

  bool wgmma_;
  std::string element_;
  std::vector<Block> blocks_;
  std::map<int, Nodes> loops_;   ///< blocks by the loop's head
  std::map<int, Nodes> latches_; ///< blocks that jump back to it
  std::string objection_;
};

Products Counter::products_of(const std::string& line) const {
  if (!starts_with(line, "mma.") && !starts_with(line, "wgmma.mma") && !starts_with(line, "wmma."))
    return {};
  const bool twice = starts_with(line, "wgmma.mma_async.sync.aligned.m64n128k");
  const int count = twice ? 2 : 1;
  const std::string start = !wgmma_ ? "mma.sync.aligned.m16n8k"
                            : twice ? "wgmma.mma_async.sync.aligned.m64n128k"
                                    : "wgmma.mma_async.sync.aligned.m64n64k";
  const std::string integer = start + (wgmma_ ? "32.s32." : "32.row.col.s32.");
  const std::string floating = start + (wgmma_ ? "16.f32." : "16.row.col.f32.");
  if (starts_with(line, integer + "s8.s8"))
    return {.s8 = count};
  if (starts_with(line, integer + "u8.s8"))
    return {.u8 = count};
  if (starts_with(line, floating + element_ + "." + element_))
    return {.float16 = count};
  return {.other = 1};
}

void Counter::split(const std::string& ptx) {
  static const llvm::Regex branch("^(@[^ \t]+[ \t]+)?bra(\\.uni)?[ \t]+([^ \t]+);$");
  std::map<std::string, int> labels;
  std::vector<std::vector<std::string>> targets;
  std::vector<bool> falls_through;
  const auto open = [&] {
    blocks_.emplace_back(), targets.emplace_back(), falls_through.push_back(true);
  };
  open();
  std::istringstream text(ptx.substr(ptx.find(".entry")));
  for (std::string line; std::getline(text, line);) {
    line.erase(0, line.find_first_not_of(" \t"));
    llvm::SmallVector<llvm::StringRef> match;
    if (starts_with(line, "$L") && line.find(':') != std::string::npos) {
      open();
      labels[line.substr(0, line.find(':'))] = static_cast<int>(blocks_.size()) - 1;
    } else if (branch.match(line, &match)) {
      blocks_.back().lines.push_back(line);
      targets.back().push_back(match[3].str());
      falls_through.back() = !match[1].empty();
      open();
    } else if (starts_with(line, "ret;")) {
      falls_through.back() = false;
      open();
    } else {
      blocks_.back().lines.push_back(line);
      blocks_.back().products = blocks_.back().products + products_of(line);
    }
  }
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (falls_through[i] && i + 1 < blocks_.size())
      blocks_[i].next.push_back(static_cast<int>(i) + 1);
    for (const std::string& target : targets[i])
      blocks_[i].next.push_back(labels.at(target));
  }
}

void Counter::find_loops() {
  std::vector<int> state(blocks_.size()); // 0 new, 1 on the path, 2 done
  std::vector<Nodes> previous(blocks_.size());
  const auto visit = [&](const auto& self, int block) -> void {
    state[block] = 1;
    for (int next : blocks_[block].next) {
      previous[next].insert(block);
      if (state[next] == 1)
        latches_[next].insert(block);
      else if (state[next] == 0)
        self(self, next);
    }
    state[block] = 2;
  };
  visit(visit, 0);
  for (const auto& [head, latches] : latches_) {
    Nodes& body = loops_[head] = {head};
    std::vector<int> open(latches.begin(), latches.end());
    while (!open.empty()) {
      const int block = open.back();
      open.pop_back();
      if (body.insert(block).second)
        open.insert(open.end(), previous[block].begin(), previous[block].end());
    }
  }
}

/// How often a loop runs, by its counter: `mov counter, first` before it, `add counter, counter,
/// step` and the comparison with the end in the block that jumps back. Once where there is none.
int Counter::trips(int head) const {
  static const llvm::Regex compare(
      "setp\\.(ne|lt)\\.[[:alnum:]_]+[ \t]+%p[0-9]+, (%r[0-9]+), (-?[0-9]+);");
  const Nodes& latches = latches_.at(head);
  const auto number = [](const std::vector<std::string>& lines, const std::string& pattern) {
    std::optional<int> found;
    const llvm::Regex form("^" + pattern + "$");
    llvm::SmallVector<llvm::StringRef> match;
    for (const std::string& line : lines)
      if (form.match(line, &match))
        found = std::stoi(match[1].str());
    return found;
  };
  std::vector<std::string> before;
  for (int block = 0; block < head; ++block)
    before.insert(before.end(), blocks_[block].lines.begin(), blocks_[block].lines.end());
  const std::vector<std::string>& latch = blocks_[*latches.begin()].lines;
  for (const std::string& line : latch) {
    llvm::SmallVector<llvm::StringRef> end;
    if (latches.size() != 1 || !compare.match(line, &end))
      continue;
    const std::string counter = end[2].str();
    const auto first = number(before, "mov\\.[[:alnum:]_]+[ \t]+" + counter + ", (-?[0-9]+);");
    const auto step = number(latch, "add\\.s32[ \t]+" + counter + ", " + counter + ", ([0-9]+);");
    const int last = std::stoi(end[3].str());
    if (first && step && (last - *first) % *step == 0)
      return (last - *first) / *step;
  }
  return 1;
}

Products Counter::per_pass(int head) {
  std::map<int, Products> known;
  return to_end_of_pass(head, head, known);
}

/// Products from a block of a loop until it is back at its head.
Products Counter::to_end_of_pass(int block, int head, std::map<int, Products>& known) {
  if (auto at = known.find(block); at != known.end())
    return at->second;
  const Nodes& loop = loops_.at(head);
  Products here = blocks_[block].products;
  Nodes next(blocks_[block].next.begin(), blocks_[block].next.end());
  if (block != head && loops_.count(block)) { // a nested loop, as one block
    here = per_pass(block);
    if (here != Products{})
      here = here * trips(block);
    next.clear();
    for (int inner : loops_.at(block))
      for (int exit : blocks_[inner].next)
        if (!loops_.at(block).count(exit))
          next.insert(exit);
  }
  std::optional<Products> rest;
  for (int successor : next) {
    if (!loop.count(successor))
      continue; // leaves the loop
    const Products way = successor == head ? Products{} : to_end_of_pass(successor, head, known);
    if (rest && *rest != way)
      objection_ = "two ways through the loop differ in their products";
    rest = way;
  }
  return known[block] = here + rest.value_or(Products{});
}

LoopProducts Counter::count() {
  LoopProducts result;
  Nodes in_loops;
  for (const auto& [head, body] : loops_) {
    in_loops.insert(body.begin(), body.end());
    const bool holds_products = std::any_of(
        body.begin(), body.end(), [&](int block) { return blocks_[block].products != Products{}; });
    const bool outermost = std::none_of(loops_.begin(), loops_.end(), [&, h = head](const auto& o) {
      return o.first != h && o.second.count(h);
    });
    if (holds_products && outermost) {
      const Products pass = per_pass(head);
      if (result.loops++ && pass != result.per_pass)
        objection_ = "two loops differ in their products";
      result.per_pass = pass;
    }
  }
  for (size_t i = 0; i < blocks_.size(); ++i)
    if (!in_loops.count(static_cast<int>(i)))
      result.outside = result.outside + blocks_[i].products;
  result.objection = objection_;
  return result;
}

} // namespace

std::ostream& operator<<(std::ostream& out, const Products& p) {
  return out << p.s8 << " s8, " << p.u8 << " u8, " << p.float16 << " 16-bit, " << p.other
             << " other";
}

LoopProducts count_products(const std::string& ptx, bool wgmma, const std::string& element) {
  return Counter(ptx, wgmma, element).count();
}

} // namespace sagebwd::test
