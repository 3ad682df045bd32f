//===- module_reference.cpp - The CPU reference on NumPy arrays ------------===//

#include "generator/pointwise.h"
#include "python/module.h"
#include "python/module_interrupt.h"
#include "runtime/reference/named_inputs.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace sagebwd::python {

namespace {

using Array = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Bytes = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;
using Numbers = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using OptionalArray = std::optional<Array>;
using Shape = std::vector<int64_t>;

struct Shapes {
  Shapes(const Problem& p, int64_t head_dim)
      : query{p.batch, p.heads, p.seq_q, head_dim}, key{p.batch, p.heads_kv, p.seq_kv, head_dim},
        row{p.batch, p.heads, p.seq_q}, matrix{p.batch, p.heads, p.seq_q, p.seq_kv} {}
  Shape query, key, row, matrix;
};

/// The values of an array that must have this shape; none where there is no array.
std::vector<float> values_of(const char* name, const OptionalArray& array, const Shape& shape) {
  if (!array)
    return {};
  if (!std::equal(shape.begin(), shape.end(), array->shape(), array->shape() + array->ndim()))
    throw SpecError(py::str("{} has shape {}; it must be {}")
                        .format(name, array->attr("shape"), py::tuple(py::cast(shape))));
  return {array->data(), array->data() + array->size()};
}

/// A NumPy array that owns `values`; None where nothing was computed.
template <typename T> py::object array_of(std::vector<T>&& values, const Shape& shape) {
  if (values.empty())
    return py::none();
  auto* owned = new std::vector<T>(std::move(values));
  py::capsule owner(owned, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(shape, owned->data(), owner);
}

reference::Inputs inputs_of(const Array& q, const Array& k, const Array& v,
                            const OptionalArray& dout, const OptionalArray& dlse,
                            float softmax_scale, const std::optional<Bytes>& listed,
                            const std::optional<Numbers>& intervals,
                            const std::vector<Numbers>& tables) {
  reference::Inputs in;
  in.problem = {q.shape(0), q.shape(1), k.shape(1), q.shape(2), k.shape(2)};
  in.head_dim = static_cast<int>(q.shape(3));
  in.softmax_scale = softmax_scale;
  const Shapes shapes(in.problem, in.head_dim);
  in.q = values_of("q", q, shapes.query);
  in.k = values_of("k", k, shapes.key);
  in.v = values_of("v", v, shapes.key);
  in.dout = values_of("dout", dout, shapes.query);
  in.dlse = values_of("dlse", dlse, shapes.row);
  if (listed) // the package has checked it
    in.listed.assign(listed->data(), listed->data() + listed->size());
  if (intervals) { // and these
    in.intervals.assign(intervals->data(), intervals->data() + intervals->size());
    in.sequences_share_intervals = intervals->shape(0) == 1;
    in.heads_share_intervals = intervals->shape(1) == 1;
  }
  for (const Numbers& table : tables) // and these, of (rows, columns)
    in.tables.push_back(
        {table.shape(0), table.shape(1), {table.data(), table.data() + table.size()}});
  return in;
}

/// Calls `compute` with the inputs and with what the expressions of the spec make of their tables.
template <typename Compute>
auto with_expressions(const reference::Inputs& in, const AttentionSpec& spec,
                      const Compute& compute) {
  if (spec.mask.empty() && !has_score(spec))
    return compute(in);
  reference::Inputs all = in;
  if (!spec.mask.empty())
    all.seen = reference::seen_by_mask(spec, in.problem, in.tables);
  if (has_score(spec))
    all.score = reference::score_by_spec(spec, in.tables);
  return compute(all);
}

template <typename T>
py::dict dict_of(reference::Outputs<T>&& outputs, const reference::Inputs& in) {
  using namespace pybind11::literals;
  const Shapes shapes(in.problem, in.head_dim);
  return py::dict("out"_a = array_of(std::move(outputs.o), shapes.query),
                  "lse"_a = array_of(std::move(outputs.lse), shapes.row),
                  "delta"_a = array_of(std::move(outputs.delta), shapes.row),
                  "dq"_a = array_of(std::move(outputs.dq), shapes.query),
                  "dk"_a = array_of(std::move(outputs.dk), shapes.key),
                  "dv"_a = array_of(std::move(outputs.dv), shapes.key),
                  "p"_a = array_of(std::move(outputs.p), shapes.matrix),
                  "dp"_a = array_of(std::move(outputs.dp), shapes.matrix),
                  "ds"_a = array_of(std::move(outputs.ds), shapes.matrix));
}

/// The package has checked the names.
reference::ProductPlan product_plan(const std::vector<std::string>& names) {
  reference::ProductPlan plan;
  for (const auto& [name, product] : reference::kProducts)
    plan.*product = std::find(names.begin(), names.end(), name) != names.end();
  return plan;
}

Array round_to(const py::object& given, const std::string& dtype) {
  const auto type = parse_word<DType>(dtype);
  const Array array = Array::ensure(given);
  if (!array)
    throw py::type_error("round_to() takes an array of numbers");
  Array result(Shape(array.shape(), array.shape() + array.ndim()));
  std::transform(array.data(), array.data() + array.size(), result.mutable_data(),
                 [&](float x) { return reference::round_to(type, x); });
  return result;
}

py::tuple named_inputs(const std::string& name, int64_t batch, int64_t heads, int64_t heads_kv,
                       int64_t seq_q, int64_t seq_kv, int head_dim, const std::string& dtype,
                       double sigma, double key_offset, uint64_t seed) {
  const Problem problem{batch, heads, heads_kv, seq_q, seq_kv};
  const auto type = parse_word<DType>(dtype);
  const reference::InputKind kind{parse_word<reference::Distribution>(name), sigma, key_offset};
  reference::Inputs in =
      interruptibly([&] { return reference::named_inputs(kind, problem, head_dim, type, seed); });
  const Shapes shapes(problem, head_dim);
  return py::make_tuple(
      array_of(std::move(in.q), shapes.query), array_of(std::move(in.k), shapes.key),
      array_of(std::move(in.v), shapes.key), array_of(std::move(in.dout), shapes.query));
}

/// Says what each distribution imitates, by name.
py::dict distributions() {
  py::dict texts;
  for (const auto& [distribution, name] : Words<reference::Distribution>::all)
    texts[py::str(std::string(name))] = std::string(reference::facts_of(distribution).text);
  return texts;
}

/// `spec` says what a query sees; the rest of it is not looked at.
py::dict exact(const reference::Inputs& in, const ResolvedSpec& spec, bool keep_matrices) {
  const auto work = [&](const reference::Inputs& all) {
    return reference::exact(all, *spec, keep_matrices);
  };
  return dict_of(interruptibly([&] { return with_expressions(in, *spec, work); }), in);
}

py::dict emulate(const reference::Inputs& in, const ResolvedSpec& spec,
                 const std::vector<std::string>& plan, bool keep_matrices, bool round_outputs,
                 const OptionalArray& given_out, const OptionalArray& given_lse) {
  const Shapes shapes(in.problem, in.head_dim);
  const std::vector<float> out = values_of("out", given_out, shapes.query);
  const std::vector<float> lse = values_of("lse", given_lse, shapes.row);
  const auto work = [&](const reference::Inputs& all) {
    return reference::emulate(all, spec, product_plan(plan), keep_matrices, round_outputs,
                              given_out ? &out : nullptr, given_lse ? &lse : nullptr);
  };
  return dict_of(interruptibly([&] { return with_expressions(in, *spec, work); }), in);
}

py::dict trace(const reference::Inputs& in, const ResolvedSpec& spec,
               const std::vector<std::string>& plan) {
  using namespace pybind11::literals;
  const auto work = [&](const reference::Inputs& all) {
    return reference::trace(all, spec, product_plan(plan));
  };
  py::dict table;
  for (const reference::TraceRow& row :
       interruptibly([&] { return with_expressions(in, *spec, work); }))
    table[row.tensor.c_str()] =
        py::dict("cosine"_a = row.figures.cosine, "rel_l2"_a = row.figures.rel_l2,
                 "bias"_a = row.figures.bias);
  return table;
}

} // namespace

void bind_reference(py::module_& m) {
  m.def("plan_of", [](const std::string& precision) {
    return names_of(reference::plan_of(parse_word<Precision>(precision)));
  });
  py::class_<reference::Inputs>(m, "Inputs").def(py::init(&inputs_of));
  m.def("round_to", round_to);
  m.def("named_inputs", named_inputs);
  m.attr("distributions") = distributions();
  m.def("exact", exact);
  m.def("emulate", emulate);
  m.def("trace", trace);
  m.def("check_size_of_trace",
        [](const Problem& problem, int head_dim) { reference::check_size(problem, head_dim); });
}

} // namespace sagebwd::python
