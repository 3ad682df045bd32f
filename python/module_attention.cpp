//===- module_attention.cpp - The operation, called with addresses ---------===//
//
// No tensor type crosses this line: the package passes sizes and strides once, then addresses and a
// stream, so one module serves every version of every framework.
//
//===----------------------------------------------------------------------===//

#include "generator/choice.h"
#include "generator/operation.h"
#include "python/module.h"
#include "python/module_gil.h"
#include "runtime/driver/driver.h"
#include "runtime/linear_branch.h"
#include "runtime/loaded_kernels.h"
#include "runtime/measure.h"
#include "runtime/route_blocks.h"

#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

namespace sagebwd::python {

namespace {

// Short of pybind11's casters: they take 5 % of a call's host time.
int64_t number_of(PyObject* given) {
  const int64_t number = PyLong_AsLongLong(given);
  if (number == -1 && PyErr_Occurred())
    throw py::error_already_set();
  return number;
}

/// Those with these addresses, or none, and these rows and columns.
Tables tables_of(const std::vector<uint64_t>& addresses,
                 const std::vector<std::array<int64_t, 2>>& sizes) {
  if (sizes.size() > kMostTables || (!addresses.empty() && addresses.size() != sizes.size()))
    throw py::type_error("each table has an address, rows and columns, and there are at most " +
                         std::to_string(kMostTables));
  Tables tables;
  for (size_t i = 0; i < sizes.size(); ++i)
    tables[i] = {addresses.empty() ? nullptr : reinterpret_cast<const void*>(addresses[i]),
                 sizes[i][0], sizes[i][1]};
  return tables;
}

/// `strides`: of each strided tensor in the order of visit_tensors(): batch, head, token.
/// `of_shares`: those of the shares, how many queries have one, whether they are of rest, and
/// whether sums are kept.
template <typename Args>
PreparedPass prepare(const Attention& attention, const Problem& problem,
                     const std::vector<std::array<int64_t, 3>>& strides, float softmax_scale,
                     bool apart, int value_dim, std::array<int64_t, 2> of_lists,
                     std::array<int64_t, 6> of_shares, std::array<int64_t, 2> of_intervals,
                     const std::vector<std::array<int64_t, 2>>& of_tables) {
  constexpr Pass pass = std::is_same_v<Args, ForwardArgs> ? Pass::forward : Pass::backward;
  Args args{.problem = problem,
            .softmax_scale = softmax_scale,
            .packing = {.apart = apart},
            .value_dim = value_dim,
            .lists = {nullptr, of_lists[0], of_lists[1]},
            .intervals = {nullptr, of_intervals[0], of_intervals[1]},
            .tables = tables_of({}, of_tables),
            .shares = {nullptr, of_shares[0], of_shares[1], of_shares[2],
                       static_cast<int>(of_shares[3]), of_shares[4] != 0, of_shares[5] != 0}};
  size_t count = 0;
  visit_tensors(args, [&]<typename T>(Operand operand, T& tensor) {
    if constexpr (std::is_same_v<T, Tensor>) {
      if (!takes(attention.spec(), caller_tensor(operand), pass))
        return;
      if (count < strides.size())
        tensor = {nullptr, strides[count][0], strides[count][1], strides[count][2]};
      ++count;
    }
  });
  if (count != strides.size())
    throw py::type_error("this pass takes the strides of " + std::to_string(count) +
                         " tensors, given are " + std::to_string(strides.size()));
  return attention.prepare(args);
}

// More than any pass has; a test gives one all of its own.
using Numbers = std::array<uint64_t, 48>;

/// How many numbers are given: the tensors' addresses, those of the workspace and the stream.
size_t read_numbers(const py::args& given, Numbers& numbers) {
  const size_t count = given.size();
  if (count < 2 || count > numbers.size())
    throw py::type_error("a pass takes its tensors' addresses, the workspace's and the stream");
  for (size_t i = 0; i < count; ++i)
    numbers[i] =
        static_cast<uint64_t>(number_of(PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i))));
  return count;
}

void run(const PreparedPass& pass, const py::args& given) {
  Numbers numbers;
  const size_t count = read_numbers(given, numbers);
  {
    const Released released;
    pass.run(std::span(numbers).first(count - 2), numbers[count - 2],
             reinterpret_cast<void*>(numbers[count - 1]));
  }
  log_to_python();
}

/// (kernel, ms) of each launch.
std::vector<std::pair<std::string, double>> run_timed(const PreparedPass& pass,
                                                      const py::args& given) {
  Numbers numbers;
  const size_t count = read_numbers(given, numbers);
  const Released released;
  std::vector<std::pair<std::string, double>> times;
  for (const auto& [kernel, ms] :
       pass.run_timed(std::span(numbers).first(count - 2), numbers[count - 2],
                      reinterpret_cast<void*>(numbers[count - 1])))
    times.emplace_back(to_string(kernel), ms);
  return times;
}

/// `sizes`: sequences, heads, lists of a head, and blocks of keys.
void pack_lists(const Attention& attention, std::array<int64_t, 4> sizes, uint64_t mask,
                uint64_t indices, int width, uint64_t counts, uint64_t row_bits, uint64_t stream) {
  const AttentionSpec& spec = attention.spec();
  const Problem problem = {sizes[0], sizes[1], sizes[1], sizes[2] * spec.sparse_q,
                           sizes[3] * spec.sparse_kv};
  {
    const Released released;
    attention.pack_lists({.problem = problem,
                          .mask = reinterpret_cast<const void*>(mask),
                          .indices = reinterpret_cast<const int32_t*>(indices),
                          .width = width,
                          .counts = reinterpret_cast<const int32_t*>(counts),
                          .row_bits = reinterpret_cast<uint32_t*>(row_bits),
                          .stream = reinterpret_cast<void*>(stream)});
  }
  log_to_python();
}

/// `strides`: of sequences and of heads, in numbers.
void pack_intervals(const Attention& attention, const Problem& problem, uint64_t numbers,
                    std::array<int64_t, 2> strides, uint64_t row_bits, uint64_t stream) {
  {
    const Released released;
    attention.pack_lists(
        {.problem = problem,
         .intervals = {reinterpret_cast<const int32_t*>(numbers), strides[0], strides[1]},
         .row_bits = reinterpret_cast<uint32_t*>(row_bits),
         .stream = reinterpret_cast<void*>(stream)});
  }
  log_to_python();
}

void pack_mask(const Attention& attention, const Problem& problem,
               const std::vector<uint64_t>& tables,
               const std::vector<std::array<int64_t, 2>>& sizes, uint64_t row_bits,
               uint64_t stream) {
  {
    const Released released;
    attention.pack_lists({.problem = problem,
                          .tables = tables_of(tables, sizes),
                          .row_bits = reinterpret_cast<uint32_t*>(row_bits),
                          .stream = reinterpret_cast<void*>(stream)});
  }
  log_to_python();
}

using Placed = std::pair<uint64_t, std::array<int64_t, 3>>; ///< address and strides

Tensor placed_tensor(const Placed& t) {
  return {reinterpret_cast<void*>(t.first), t.second[0], t.second[1], t.second[2]};
}

void pool_blocks_of(const Attention& attention, const Problem& problem, const Placed& q,
                    const Placed& k, uint64_t query_sums, uint64_t key_sums, uint64_t stream) {
  {
    const Released released;
    pool_blocks({.problem = problem,
                 .q = placed_tensor(q),
                 .k = placed_tensor(k),
                 .query_sums = reinterpret_cast<float*>(query_sums),
                 .key_sums = reinterpret_cast<float*>(key_sums),
                 .stream = reinterpret_cast<void*>(stream)},
                attention);
  }
  log_to_python();
}

/// `rows` lists of `blocks` blocks.
void top_blocks_of(const Attention& attention, int64_t rows, int64_t blocks, uint64_t scores,
                   int kept, uint64_t always, uint64_t mask, uint64_t row_bits, uint64_t stream) {
  const AttentionSpec& spec = attention.spec();
  {
    const Released released;
    top_blocks({.problem = {1, 1, 1, rows * spec.sparse_q, blocks * spec.sparse_kv},
                .scores = reinterpret_cast<const float*>(scores),
                .kept = kept,
                .always = reinterpret_cast<const void*>(always),
                .mask = reinterpret_cast<void*>(mask),
                .row_bits = reinterpret_cast<uint32_t*>(row_bits),
                .stream = reinterpret_cast<void*>(stream)},
               attention);
  }
  log_to_python();
}

/// `sums`: of the blocks of queries and of keys. `maps`: their addresses, 0 for none, and whether
/// each head has its own.
void route_blocks_of(const Attention& attention, const Problem& problem, const Placed& q,
                     const Placed& k, std::array<uint64_t, 2> sums,
                     const std::array<std::pair<uint64_t, bool>, 2>& maps, int kept,
                     uint64_t always, uint64_t mask, uint64_t row_bits, uint64_t stream) {
  const auto map = [](const std::pair<uint64_t, bool>& of) -> RouterMap {
    return {reinterpret_cast<const float*>(of.first), of.second};
  };
  {
    const Released released;
    route_blocks({.pooled = {.problem = problem,
                             .q = placed_tensor(q),
                             .k = placed_tensor(k),
                             .query_sums = reinterpret_cast<float*>(sums[0]),
                             .key_sums = reinterpret_cast<float*>(sums[1]),
                             .stream = reinterpret_cast<void*>(stream)},
                  .query_map = map(maps[0]),
                  .key_map = map(maps[1]),
                  .kept = kept,
                  .always = reinterpret_cast<const void*>(always),
                  .mask = reinterpret_cast<void*>(mask),
                  .row_bits = reinterpret_cast<uint32_t*>(row_bits)},
                 attention);
  }
  log_to_python();
}

Operand operand_named(const std::string& name) {
  for (int i = 0; i < static_cast<int>(Operand::count); ++i)
    if (name_of(static_cast<Operand>(i)) == name)
      return static_cast<Operand>(i);
  throw SpecError("'" + name + "' is no tensor of kernels");
}

/// `given`: name, address and strides of each tensor.
void run_linear(const Attention& attention, const std::string& kernel, const Problem& problem,
                const std::vector<std::tuple<std::string, uint64_t, std::array<int64_t, 3>>>& given,
                bool one_sum, uint64_t stream) {
  LinearCall call{
      parse_word<KernelKind>(kernel), problem, {}, one_sum, reinterpret_cast<void*>(stream)};
  for (const auto& [name, address, strides] : given)
    call.given.push_back({operand_named(name), address, {strides[0], strides[1], strides[2]}});
  {
    const Released released;
    launch_linear(call, attention);
  }
  log_to_python();
}

py::list rates_of(int device) {
  std::vector<MeasuredRate> rates;
  {
    const Released released;
    rates = measure_rates(device);
  }
  using namespace pybind11::literals;
  py::list found;
  for (const MeasuredRate& rate : rates)
    found.append(py::dict("name"_a = rate.name, "per_clock"_a = rate.per_clock,
                          "tera"_a = rate.tera, "clock_ghz"_a = rate.clock_ghz));
  return found;
}

} // namespace

Tiles tiles_of_text(const std::map<std::string, std::string>& texts) {
  Tiles tiles;
  for (const auto& [kernel, tile] : texts)
    tiles[parse_word<KernelKind>(kernel)] = parse_tile(tile);
  return tiles;
}

void bind_attention(py::module_& m) {
  m.def("check_value_dim",
        [](int value_dim, const ResolvedSpec& spec) { check_value_dim(value_dim, spec); });
  using WithoutGil = py::call_guard<Released>;

  py::class_<Attention>(m, "Attention", "One operation on one device; thread-safe.")
      .def(
          py::init([](const ResolvedSpec& spec, int device, const std::string& family,
                      const std::map<std::string, std::string>& tiles) {
            // Not as a guard of the call: what a factory returns enters pybind11's table of
            // objects within that, and the table is the GIL's.
            const Released released;
            if (!tiles.empty())
              return std::make_unique<Attention>(*spec, device, tiles_of_text(tiles));
            if (family.empty())
              return std::make_unique<Attention>(*spec, device);
            const auto wanted = parse_word<Family>(family); // before there need be a device
            const auto info = driver::device_info(device);
            const Arch& arch = arch_for_capability(info.major, info.minor);
            return std::make_unique<Attention>(*spec, device, default_tiles(spec, arch, wanted));
          }),
          py::arg("spec"), py::arg("device"), py::arg("family") = "",
          py::arg("tiles") = std::map<std::string, std::string>(),
          "With tiles, such as {'forward': 'mma 64x128 w4 s1 b2'}, the kernels have these, and all "
          "others the default ones. With a family they have its default tiles; else those of "
          "records, or the GPU's.")
      .def_property_readonly("spec", [](const Attention& a) { return a.spec(); })
      .def_property_readonly("arch", [](const Attention& a) { return a.arch().name; })
      .def(
          "warmup",
          [](Attention& attention, bool backward, const std::optional<Problem>& problem) {
            {
              const Released released;
              attention.warmup(backward, problem);
            }
            log_to_python();
          },
          "Compiles and loads every kernel.")
      .def(
          "build_ahead",
          [](Attention& attention, const Problem& problem, uint64_t stream) {
            {
              const Released released;
              attention.build_ahead(problem, reinterpret_cast<void*>(stream));
            }
            log_to_python();
          },
          "Builds the kernels of both passes side by side.")
      .def("forward_workspace_bytes", &Attention::forward_workspace_bytes)
      .def("backward_workspace_bytes", &Attention::backward_workspace_bytes)
      .def("kept_sums_bytes", &Attention::kept_sums_bytes)
      .def("prepare_forward", &prepare<ForwardArgs>, py::arg("problem"), py::arg("strides"),
           py::arg("softmax_scale"), py::arg("apart") = false, py::arg("value_dim") = 0,
           py::arg("of_lists") = std::array<int64_t, 2>{},
           py::arg("of_shares") = std::array<int64_t, 6>{0, 0, 0, 1, 0, 0},
           py::arg("of_intervals") = std::array<int64_t, 2>{},
           py::arg("of_tables") = std::vector<std::array<int64_t, 2>>{})
      .def("prepare_backward", &prepare<BackwardArgs>, py::arg("problem"), py::arg("strides"),
           py::arg("softmax_scale"), py::arg("apart") = false, py::arg("value_dim") = 0,
           py::arg("of_lists") = std::array<int64_t, 2>{},
           py::arg("of_shares") = std::array<int64_t, 6>{0, 0, 0, 1, 0, 0},
           py::arg("of_intervals") = std::array<int64_t, 2>{},
           py::arg("of_tables") = std::vector<std::array<int64_t, 2>>{})
      .def("pack_lists", &pack_lists, py::arg("sizes"), py::arg("mask"), py::arg("indices"),
           py::arg("width"), py::arg("counts"), py::arg("row_bits"), py::arg("stream"))
      .def("pack_intervals", &pack_intervals, py::arg("problem"), py::arg("numbers"),
           py::arg("strides"), py::arg("row_bits"), py::arg("stream"))
      .def("pack_mask", &pack_mask, py::arg("problem"), py::arg("tables"), py::arg("sizes"),
           py::arg("row_bits"), py::arg("stream"))
      .def("pool_blocks", &pool_blocks_of, py::arg("problem"), py::arg("q"), py::arg("k"),
           py::arg("query_sums"), py::arg("key_sums"), py::arg("stream"))
      .def("top_blocks", &top_blocks_of, py::arg("rows"), py::arg("blocks"), py::arg("scores"),
           py::arg("kept"), py::arg("always"), py::arg("mask"), py::arg("row_bits"),
           py::arg("stream"))
      .def("route_blocks", &route_blocks_of, py::arg("problem"), py::arg("q"), py::arg("k"),
           py::arg("sums"), py::arg("maps"), py::arg("kept"), py::arg("always"), py::arg("mask"),
           py::arg("row_bits"), py::arg("stream"))
      .def("run_linear", &run_linear, py::arg("kernel"), py::arg("problem"), py::arg("given"),
           py::arg("one_sum"), py::arg("stream"))
      .def("estimated_parts",
           [](const Attention& a, const Problem& problem) {
             return estimated_parts(a.spec(), problem);
           })
      .def_property_readonly("has_linear_kernels",
                             [](const Attention& a) { return has_linear_kernels(a.spec()); });

  py::class_<PreparedPass>(m, "PreparedPass", "A pass over tensors of one size; thread-safe.")
      .def_property_readonly("workspace_bytes", &PreparedPass::workspace_bytes)
      .def("__call__", &run)
      .def("timed", &run_timed, "Runs the kernels one after the other: (kernel, ms) of each.");

  // For measurements that stand for another GPU.
  m.def("live_as_with", &live_as_with, WithoutGil(), py::arg("sm_bytes"));
  m.def("padded_shared_bytes", &padded_shared_bytes, py::arg("bytes"), py::arg("of_other"),
        py::arg("of_this"));
  m.def("measure_rates", &rates_of, py::arg("device"));
}

} // namespace sagebwd::python
