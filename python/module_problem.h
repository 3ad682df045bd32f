//===- module_problem.h - A Problem from Python's numbers -------------------===//
#pragma once

#include "runtime/attention.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

namespace pybind11::detail {

/// A number for each of its fields.
template <> struct type_caster<sagebwd::Problem> {
  PYBIND11_TYPE_CASTER(sagebwd::Problem, const_name("tuple[int, ...]"));
  static constexpr size_t kNumbers = [] {
    size_t count = 0;
    sagebwd::Problem problem;
    visit_fields(problem, [&](const sagebwd::Label&, int64_t&) { ++count; });
    return count;
  }();
  bool load(handle source, bool convert) {
    make_caster<std::array<int64_t, kNumbers>> numbers;
    if (!numbers.load(source, convert))
      return false;
    size_t i = 0;
    const std::array<int64_t, kNumbers>& given = numbers;
    visit_fields(value, [&](const sagebwd::Label&, int64_t& field) { field = given[i++]; });
    return true;
  }
};

} // namespace pybind11::detail
