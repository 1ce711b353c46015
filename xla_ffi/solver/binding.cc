// The extension module magi_jax._planner. It needs neither XLA nor JAX, so that a data-loading
// process may import it. Arrays are checked for length here; their meaning is the caller's affair.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "xla_ffi/solver/bind_documents.h"
#include "xla_ffi/solver/bind_stages.h"
#include "xla_ffi/solver/bind_tables.h"
#include "xla_ffi/solver/problem.h"

namespace magi_jax::solver {
namespace {

namespace py = pybind11;

// Number of the contract with magi_jax.solver; INTERFACE in magi_jax/solver/engine.py. Raise both
// when a function of this module changes its arguments, its results or what they mean.
constexpr int kInterface = 7;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Keeps the arrays alive that a Problem points into.
class PlacementProblem {
 public:
  PlacementProblem(Array<int64_t> area, Array<int32_t> size, Array<int32_t> spare,
                   Array<int32_t> rows, Array<int32_t> span_ptr, Array<int32_t> need_ptr,
                   Array<int32_t> needs, int32_t num_ranks, int32_t ranks_per_node)
      : area_(std::move(area)),
        size_(std::move(size)),
        spare_(std::move(spare)),
        rows_(std::move(rows)),
        span_ptr_(std::move(span_ptr)),
        need_ptr_(std::move(need_ptr)),
        needs_(std::move(needs)) {
    const py::ssize_t units = area_.size();
    if (size_.size() != units || spare_.size() != units || span_ptr_.size() != units + 1 ||
        need_ptr_.size() != units + 1 || needs_.size() % 2 != 0)
      throw std::invalid_argument("arrays of a placement problem do not fit together");
    if (num_ranks < 1 || ranks_per_node < 1 || num_ranks % ranks_per_node != 0)
      throw std::invalid_argument("num_ranks must be a positive multiple of ranks_per_node");
    problem_ = {area_.data(),
                size_.data(),
                spare_.data(),
                rows_.data(),
                span_ptr_.data(),
                need_ptr_.data(),
                reinterpret_cast<const Interval*>(needs_.data()),
                static_cast<int32_t>(units),
                static_cast<int32_t>(rows_.size()),
                num_ranks,
                ranks_per_node};
  }

  // Owners, or None when a unit finds no room.
  std::optional<Array<int32_t>> RunGreedy(
      const Array<int32_t>& order, std::tuple<int64_t, int32_t, int32_t, double> capacity,
      std::tuple<double, double, double, double, double, double> weights,
      const std::optional<Array<int32_t>>& node) const {
    CheckUnits(order);
    if (node) CheckNumbers(*node, problem_.num_nodes(), "one node per unit is needed");
    Array<int32_t> owner(problem_.num_units);
    const auto [tokens, slot, part_slots, light_area] = capacity;
    const auto [volume, held, sent, node_weight, node_held, area_limit] = weights;
    if (!Greedy(problem_, order.data(), {tokens, slot, part_slots, light_area},
                {volume, held, sent, node_weight, node_held, area_limit},
                node ? node->data() : nullptr, owner.mutable_data()))
      return std::nullopt;
    return owner;
  }

  // Owners, or None where parts of chunks would leave places half empty.
  std::optional<Array<int32_t>> RunDeal(
      std::tuple<int64_t, int32_t, int32_t, double> capacity) const {
    Array<int32_t> owner(problem_.num_units);
    const auto [tokens, slot, part_slots, light_area] = capacity;
    if (!Deal(problem_, {tokens, slot, part_slots, light_area}, owner.mutable_data()))
      return std::nullopt;
    return owner;
  }

  // (owner, rows, area) as RunMeasure gives them.
  py::tuple RunRefine(const Array<int32_t>& owner, int64_t area_limit, int64_t moves, uint64_t seed,
                      double node_weight, double temperature, int64_t period) const {
    CheckOwner(owner);
    Array<int32_t> out(problem_.num_units);
    std::copy(owner.data(), owner.data() + owner.size(), out.mutable_data());
    const Loads loads = Refine(
        problem_, {area_limit, moves, seed, node_weight, temperature, period}, out.mutable_data());
    return py::make_tuple(out, Array<int64_t>(loads.rows.size(), loads.rows.data()),
                          Array<int64_t>(loads.area.size(), loads.area.data()));
  }

  py::tuple RunMeasure(const Array<int32_t>& owner) const {
    CheckOwner(owner);
    const Loads loads = Measure(problem_, owner.data());
    return py::make_tuple(Array<int64_t>(loads.rows.size(), loads.rows.data()),
                          Array<int64_t>(loads.area.size(), loads.area.data()));
  }

 private:
  void CheckNumbers(const Array<int32_t>& numbers, int32_t limit, const char* what) const {
    if (numbers.size() != problem_.num_units) throw std::invalid_argument(what);
    for (py::ssize_t i = 0; i < numbers.size(); ++i)
      if (numbers.data()[i] < 0 || numbers.data()[i] >= limit)
        throw std::invalid_argument("a unit, an owner or a node is out of range");
  }
  void CheckUnits(const Array<int32_t>& units) const {
    CheckNumbers(units, problem_.num_units, "one entry per unit is needed");
  }
  void CheckOwner(const Array<int32_t>& owner) const {
    CheckNumbers(owner, problem_.num_ranks, "one owner per unit is needed");
  }

  Array<int64_t> area_;
  Array<int32_t> size_, spare_, rows_, span_ptr_, need_ptr_, needs_;
  Problem problem_;
};

}  // namespace

PYBIND11_MODULE(_planner, m) {
  m.doc() = "Compiled parts of magi_jax.solver: placing units on ranks, and the tables of a plan.";
  m.attr("interface") = kInterface;
  BindDocuments(m);
  BindTables(m);
  BindStages(m);
  py::class_<PlacementProblem>(m, "PlacementProblem")
      .def(py::init<Array<int64_t>, Array<int32_t>, Array<int32_t>, Array<int32_t>, Array<int32_t>,
                    Array<int32_t>, Array<int32_t>, int32_t, int32_t>())
      .def("greedy", &PlacementProblem::RunGreedy, py::arg("order"), py::arg("capacity"),
           py::arg("weights"), py::arg("node") = std::nullopt)
      .def("refine", &PlacementProblem::RunRefine, py::arg("owner"), py::arg("area_limit"),
           py::arg("moves"), py::arg("seed"), py::arg("node_weight"), py::arg("temperature"),
           py::arg("period") = 0)
      .def("deal", &PlacementProblem::RunDeal)
      .def("measure", &PlacementProblem::RunMeasure);
}

}  // namespace magi_jax::solver
