//===- module_expressions.cpp - What masks and score functions read --------===//

#include "generator/pointwise.h"
#include "python/module.h"

namespace sagebwd::python {

namespace {

/// The names of the tables that a mask and a score function read, each empty for none, with how
/// many indices each has and whether it is the latter's; and whether the mask depends on b, and on
/// h.
py::tuple expression_facts(const std::string& mask, const std::string& score) {
  AttentionSpec spec;
  spec.mask = mask, spec.score = score;
  py::list tables;
  for (const auto& [name, indices, of_score] : tables_of(spec))
    tables.append(py::make_tuple(name, indices, of_score));
  return py::make_tuple(tables, mask_depends_on_batch(spec), mask_depends_on_head(spec));
}

/// Whether a score function, a text, makes more of s than s + g, for some g without s.
bool score_bends(const std::string& score) {
  AttentionSpec spec;
  spec.score = score;
  return bends_scores(spec);
}

} // namespace

void bind_expressions(py::module_& m) {
  m.def("expression_facts", &expression_facts, py::arg("mask"), py::arg("score"));
  m.def("score_bends", &score_bends, py::arg("score"));
}

} // namespace sagebwd::python
