//===- module_front.cpp - Norm and RoPE of queries and keys, gates ---------===//

#include "python/module.h"
#include "python/module_gil.h"
#include "runtime/front_end.h"

#include <array>
#include <tuple>

namespace sagebwd::python {

namespace {

using Placed = std::pair<uint64_t, std::array<int64_t, 3>>; ///< address and strides
using PerHead = std::pair<uint64_t, bool>; ///< address, 0 for none, and whether heads differ
/// Addresses of cosines and sines, 0 for none, and the strides for batch and token.
using Table = std::array<int64_t, 4>;
/// x, y, whether there is a norm, gain, 1/rms, and the table.
using SideOf = std::tuple<Placed, Placed, bool, PerHead, PerHead, Table>;
/// dx, and the addresses of dgain, its parts and d(1/rms), 0 for what is not wanted.
using GradientsOf = std::tuple<Placed, std::array<uint64_t, 3>>;
/// rope_begin, rope_channels, and whether pairs are interleaved.
using Rope = std::tuple<int, int, bool>;

template <typename T> T* at(uint64_t address) { return reinterpret_cast<T*>(address); }

Tensor tensor_of(const Placed& t) {
  return {at<void>(t.first), t.second[0], t.second[1], t.second[2]};
}

FrontSide side_of(const SideOf& given) {
  const auto& [x, y, normed, gain, inv_rms, table] = given;
  return {.x = tensor_of(x),
          .y = tensor_of(y),
          .normed = normed,
          .gain = at<const float>(gain.first),
          .gain_per_head = gain.second,
          .inv_rms = at<const float>(inv_rms.first),
          .inv_rms_per_head = inv_rms.second,
          .rope = {at<const float>(static_cast<uint64_t>(table[0])),
                   at<const float>(static_cast<uint64_t>(table[1])), table[2], table[3]}};
}

FrontCall call_of(const Problem& problem, const SideOf& q, const SideOf& k, float eps,
                  const Rope& rope, uint64_t stream) {
  return {.problem = problem,
          .q = side_of(q),
          .k = side_of(k),
          .norm_eps = eps,
          .rope_begin = std::get<0>(rope),
          .rope_channels = std::get<1>(rope),
          .rope_interleaved = std::get<2>(rope),
          .stream = at<void>(stream)};
}

FrontSideGradients gradients_of(const GradientsOf& given) {
  const auto& [dx, floats] = given;
  return {tensor_of(dx), at<float>(floats[0]), at<float>(floats[1]), at<float>(floats[2])};
}

void front_of(const Attention& attention, const Problem& problem, const SideOf& q, const SideOf& k,
              float eps, const Rope& rope, uint64_t stream) {
  {
    const Released released;
    front(call_of(problem, q, k, eps, rope, stream), attention);
  }
  log_to_python();
}

void front_gradients_of(const Attention& attention, const Problem& problem, const SideOf& q,
                        const SideOf& k, float eps, const Rope& rope, const GradientsOf& of_q,
                        const GradientsOf& of_k, uint64_t stream) {
  {
    const Released released;
    front_gradients({.of = call_of(problem, q, k, eps, rope, stream),
                     .q = gradients_of(of_q),
                     .k = gradients_of(of_k)},
                    attention);
  }
  log_to_python();
}

GateCall gate_call_of(const Problem& problem, const std::array<Placed, 3>& tensors,
                      uint64_t stream) {
  return {.problem = problem,
          .out = tensor_of(tensors[0]),
          .gate = tensor_of(tensors[1]),
          .gated = tensor_of(tensors[2]),
          .stream = at<void>(stream)};
}

void gate_of(const Attention& attention, const Problem& problem,
             const std::array<Placed, 3>& tensors, uint64_t stream) {
  {
    const Released released;
    gate(gate_call_of(problem, tensors, stream), attention);
  }
  log_to_python();
}

void gate_gradients_of(const Attention& attention, const Problem& problem,
                       const std::array<Placed, 3>& tensors, const std::array<Placed, 2>& gradients,
                       uint64_t stream) {
  {
    const Released released;
    gate_gradients({.of = gate_call_of(problem, tensors, stream),
                    .dout = tensor_of(gradients[0]),
                    .dgate = tensor_of(gradients[1])},
                   attention);
  }
  log_to_python();
}

} // namespace

void bind_front(py::module_& m) {
  m.def("front", &front_of, py::arg("attention"), py::arg("problem"), py::arg("q"), py::arg("k"),
        py::arg("eps"), py::arg("rope"), py::arg("stream"));
  m.def("front_gradients", &front_gradients_of, py::arg("attention"), py::arg("problem"),
        py::arg("q"), py::arg("k"), py::arg("eps"), py::arg("rope"), py::arg("of_q"),
        py::arg("of_k"), py::arg("stream"));
  m.def("gate", &gate_of, py::arg("attention"), py::arg("problem"), py::arg("tensors"),
        py::arg("stream"));
  m.def("gate_gradients", &gate_gradients_of, py::arg("attention"), py::arg("problem"),
        py::arg("tensors"), py::arg("gradients"), py::arg("stream"));
  m.def(
      "front_part_floats",
      [](const Attention& attention, const Problem& problem) {
        return std::pair(front_part_floats(Tokens::queries, attention.spec(), problem),
                         front_part_floats(Tokens::keys, attention.spec(), problem));
      },
      py::arg("attention"), py::arg("problem"));
}

} // namespace sagebwd::python
