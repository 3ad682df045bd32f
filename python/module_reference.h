//===- module_reference.h - The CPU reference on NumPy arrays --------------===//
#pragma once

#include "runtime/reference/reference.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

namespace sagebwd::python {

namespace py = pybind11;
using Array = py::array_t<float, py::array::c_style | py::array::forcecast>;

inline std::vector<float> values_of(const Array& array) {
  return {array.data(), array.data() + array.size()};
}

/// A NumPy array that owns `values`; None where nothing was computed.
template <typename T> py::object array_of(std::vector<T>&& values, std::vector<int64_t> shape) {
  if (values.empty())
    return py::none();
  auto* owned = new std::vector<T>(std::move(values));
  py::capsule owner(owned, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(shape, owned->data(), owner);
}

/// Inputs of (B, H, M, D), (B, Hk, N, D) twice, (B, H, M, D) and (B, H, M).
inline reference::Inputs inputs_of(const Array& q, const Array& k, const Array& v,
                                   const std::optional<Array>& dout,
                                   const std::optional<Array>& dlse, float softmax_scale) {
  if (q.ndim() != 4 || k.ndim() != 4 || v.ndim() != 4)
    throw SpecError(
        "q, k and v must be arrays of rank 4 (batch, head, token, channel); got ranks " +
        std::to_string(q.ndim()) + ", " + std::to_string(k.ndim()) + " and " +
        std::to_string(v.ndim()));
  auto expect = [](const char* name, const Array& array, std::vector<int64_t> shape) {
    bool same = array.ndim() == static_cast<py::ssize_t>(shape.size());
    std::string got, wanted;
    for (py::ssize_t i = 0; i < array.ndim(); ++i)
      got += (i ? ", " : "") + std::to_string(array.shape(i));
    for (size_t i = 0; i < shape.size(); ++i) {
      wanted += (i ? ", " : "") + std::to_string(shape[i]);
      same = same && array.shape(i) == shape[i];
    }
    if (!same)
      throw SpecError(std::string(name) + " has shape (" + got + "); it must be (" + wanted + ")");
  };
  reference::Inputs in;
  in.problem = {q.shape(0), q.shape(1), k.shape(1), q.shape(2), k.shape(2)};
  in.head_dim = static_cast<int>(q.shape(3));
  in.softmax_scale = softmax_scale;
  expect("k", k, {q.shape(0), k.shape(1), k.shape(2), q.shape(3)});
  expect("v", v, {q.shape(0), k.shape(1), k.shape(2), q.shape(3)});
  in.q = values_of(q);
  in.k = values_of(k);
  in.v = values_of(v);
  if (dout) {
    expect("dout", *dout, {q.shape(0), q.shape(1), q.shape(2), q.shape(3)});
    in.dout = values_of(*dout);
  }
  if (dlse) {
    expect("dlse", *dlse, {q.shape(0), q.shape(1), q.shape(2)});
    in.dlse = values_of(*dlse);
  }
  return in;
}

template <typename T>
py::dict dict_of(reference::Outputs<T>&& outputs, const Problem& p, int64_t head_dim) {
  std::vector<int64_t> query{p.batch, p.heads, p.seq_q, head_dim};
  std::vector<int64_t> key{p.batch, p.heads_kv, p.seq_kv, head_dim};
  std::vector<int64_t> row{p.batch, p.heads, p.seq_q};
  std::vector<int64_t> matrix{p.batch, p.heads, p.seq_q, p.seq_kv};
  py::dict result;
  result["out"] = array_of(std::move(outputs.o), query);
  result["lse"] = array_of(std::move(outputs.lse), row);
  result["delta"] = array_of(std::move(outputs.delta), row);
  result["dq"] = array_of(std::move(outputs.dq), query);
  result["dk"] = array_of(std::move(outputs.dk), key);
  result["dv"] = array_of(std::move(outputs.dv), key);
  result["p"] = array_of(std::move(outputs.p), matrix);
  result["dp"] = array_of(std::move(outputs.dp), matrix);
  result["ds"] = array_of(std::move(outputs.ds), matrix);
  return result;
}

inline reference::ProductPlan product_plan(const std::vector<std::string>& names) {
  reference::ProductPlan plan{false, false, false, false, false, false};
  for (const std::string& name : names) {
    bool* product = name == "s"    ? &plan.s
                    : name == "pv" ? &plan.pv
                    : name == "dv" ? &plan.dv
                    : name == "dp" ? &plan.dp
                    : name == "dq" ? &plan.dq
                    : name == "dk" ? &plan.dk
                                   : nullptr;
    if (!product)
      throw SpecError("'" + name + "' is none of the products s, pv, dv, dp, dq, dk");
    *product = true;
  }
  return plan;
}

inline std::vector<std::string> names_of(const reference::ProductPlan& plan) {
  std::vector<std::string> names;
  for (auto [name, on] : {std::pair("s", plan.s),
                          {"pv", plan.pv},
                          {"dv", plan.dv},
                          {"dp", plan.dp},
                          {"dq", plan.dq},
                          {"dk", plan.dk}})
    if (on)
      names.emplace_back(name);
  return names;
}

inline void bind_reference(py::module_& m) {
  using namespace pybind11::literals;

  m.def("plan_of", [](const std::string& precision) {
    return names_of(reference::plan_of(parse_word<Precision>(precision)));
  });
  m.def(
      "round_to",
      [](const Array& array, const std::string& dtype) {
        DType type = parse_word<DType>(dtype);
        Array result(std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()));
        const float* from = array.data();
        float* to = result.mutable_data();
        for (py::ssize_t i = 0; i < array.size(); ++i)
          to[i] = reference::round_to(type, from[i]);
        return result;
      },
      "array"_a, "dtype"_a, "Round to nearest even, as float32.");
  m.def(
      "random_inputs",
      [](int64_t batch, int64_t heads, int64_t heads_kv, int64_t seq_q, int64_t seq_kv,
         int head_dim, const std::string& dtype, double sigma, uint64_t seed) {
        Problem p{batch, heads, heads_kv, seq_q, seq_kv};
        reference::Inputs in;
        {
          py::gil_scoped_release released;
          in = reference::random_inputs(p, head_dim, parse_word<DType>(dtype), sigma, seed);
        }
        std::vector<int64_t> query{batch, heads, seq_q, head_dim};
        std::vector<int64_t> key{batch, heads_kv, seq_kv, head_dim};
        return py::make_tuple(array_of(std::move(in.q), query), array_of(std::move(in.k), key),
                              array_of(std::move(in.v), key), array_of(std::move(in.dout), query));
      },
      "batch"_a, "heads"_a, "heads_kv"_a, "seq_q"_a, "seq_kv"_a, "head_dim"_a, "dtype"_a, "sigma"_a,
      "seed"_a);
  m.def(
      "exact",
      [](const Array& q, const Array& k, const Array& v, const std::optional<Array>& dout,
         const std::optional<Array>& dlse, float softmax_scale, const std::string& causal,
         bool keep_matrices) {
        reference::Inputs in = inputs_of(q, k, v, dout, dlse, softmax_scale);
        Causal mask = parse_word<Causal>(causal);
        reference::Outputs<double> outputs;
        {
          py::gil_scoped_release released;
          outputs = reference::exact(in, mask, keep_matrices);
        }
        return dict_of(std::move(outputs), in.problem, in.head_dim);
      },
      "q"_a, "k"_a, "v"_a, "dout"_a, "dlse"_a, "softmax_scale"_a, "causal"_a, "keep_matrices"_a);
  m.def(
      "emulate",
      [](const ResolvedSpec& spec, const std::vector<std::string>& plan, const Array& q,
         const Array& k, const Array& v, const std::optional<Array>& dout,
         const std::optional<Array>& dlse, float softmax_scale, bool keep_matrices,
         bool round_outputs, const std::optional<Array>& given_out,
         const std::optional<Array>& given_lse) {
        reference::Inputs in = inputs_of(q, k, v, dout, dlse, softmax_scale);
        std::vector<float> out = given_out ? values_of(*given_out) : std::vector<float>();
        std::vector<float> lse = given_lse ? values_of(*given_lse) : std::vector<float>();
        reference::Outputs<float> outputs;
        {
          py::gil_scoped_release released;
          outputs = reference::emulate(in, spec, product_plan(plan), keep_matrices, round_outputs,
                                       given_out ? &out : nullptr, given_lse ? &lse : nullptr);
        }
        return dict_of(std::move(outputs), in.problem, in.head_dim);
      },
      "spec"_a, "plan"_a, "q"_a, "k"_a, "v"_a, "dout"_a, "dlse"_a, "softmax_scale"_a,
      "keep_matrices"_a, "round_outputs"_a, "given_out"_a, "given_lse"_a);
  m.def(
      "trace",
      [](const ResolvedSpec& spec, const std::vector<std::string>& plan, const Array& q,
         const Array& k, const Array& v, const Array& dout, float softmax_scale) {
        reference::Inputs in = inputs_of(q, k, v, dout, std::nullopt, softmax_scale);
        std::vector<reference::TraceRow> rows;
        {
          py::gil_scoped_release released;
          rows = reference::trace(in, spec, product_plan(plan));
        }
        py::dict table;
        for (const reference::TraceRow& row : rows)
          table[row.tensor.c_str()] =
              py::dict("cosine"_a = row.figures.cosine, "rel_l2"_a = row.figures.rel_l2);
        return table;
      },
      "spec"_a, "plan"_a, "q"_a, "k"_a, "v"_a, "dout"_a, "softmax_scale"_a);
}

} // namespace sagebwd::python
