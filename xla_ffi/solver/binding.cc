// The extension module magi_jax._planner. It needs neither XLA nor JAX, so that a data-loading
// process may import it. Arrays are checked for length here; their meaning is the caller's affair.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "xla_ffi/solver/problem.h"
#include "xla_ffi/solver/tile_runs.h"

namespace magi_jax::solver {
namespace {

namespace py = pybind11;
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

  Array<int32_t> RunGreedy(
      const Array<int32_t>& order, std::tuple<int64_t, int32_t, int32_t, double> capacity,
      std::tuple<double, double, double, double, double, double> weights) const {
    CheckUnits(order);
    Array<int32_t> owner(problem_.num_units);
    const auto [tokens, slot, part_slots, light_area] = capacity;
    const auto [volume, held, sent, node, node_held, area_limit] = weights;
    if (!Greedy(problem_, order.data(), {tokens, slot, part_slots, light_area},
                {volume, held, sent, node, node_held, area_limit}, owner.mutable_data()))
      throw std::invalid_argument("the ranks have no room for all units");
    return owner;
  }

  Array<int32_t> RunRefine(const Array<int32_t>& owner, int64_t area_limit, int64_t moves,
                           uint64_t seed, double node_weight, double temperature) const {
    CheckOwner(owner);
    Array<int32_t> out(problem_.num_units);
    std::copy(owner.data(), owner.data() + owner.size(), out.mutable_data());
    Refine(problem_, {area_limit, moves, seed, node_weight, temperature}, out.mutable_data());
    return out;
  }

  py::tuple RunMeasure(const Array<int32_t>& owner) const {
    CheckOwner(owner);
    const Loads loads = Measure(problem_, owner.data());
    return py::make_tuple(Array<int64_t>(loads.rows.size(), loads.rows.data()),
                          Array<int64_t>(loads.area.size(), loads.area.data()));
  }

 private:
  void CheckUnits(const Array<int32_t>& units) const {
    if (units.size() != problem_.num_units)
      throw std::invalid_argument("one entry per unit is needed");
    for (py::ssize_t i = 0; i < units.size(); ++i)
      if (units.data()[i] < 0 || units.data()[i] >= problem_.num_units)
        throw std::invalid_argument("a unit is out of range");
  }
  void CheckOwner(const Array<int32_t>& owner) const {
    if (owner.size() != problem_.num_units)
      throw std::invalid_argument("one owner per unit is needed");
    for (py::ssize_t i = 0; i < owner.size(); ++i)
      if (owner.data()[i] < 0 || owner.data()[i] >= problem_.num_ranks)
        throw std::invalid_argument("an owner is out of range");
  }

  Array<int64_t> area_;
  Array<int32_t> size_, spare_, rows_, span_ptr_, need_ptr_, needs_;
  Problem problem_;
};

// Rows of each part, padded with zeros to the longest: [P, L, width].
Array<int32_t> Pad(const int32_t* rows, const std::vector<int64_t>& before, int64_t width) {
  const int64_t num_parts = static_cast<int64_t>(before.size()) - 1;
  int64_t most = 0;
  for (int64_t p = 0; p < num_parts; ++p) most = std::max(most, before[p + 1] - before[p]);
  Array<int32_t> out({num_parts, most, width});
  std::fill(out.mutable_data(), out.mutable_data() + out.size(), 0);
  for (int64_t p = 0; p < num_parts; ++p)
    std::copy(rows + before[p] * width, rows + before[p + 1] * width,
              out.mutable_data() + p * most * width);
  return out;
}

// (ptr [P, M + 1], runs [P, R, 6], ids [P, I, 1], order [P, M]) of slices [A, 6] of rising parts
// [A].
py::tuple RunWalkTiles(const Array<int64_t>& slices, const Array<int64_t>& part, int64_t num_parts,
                       int64_t length, int64_t tile_size) {
  static_assert(sizeof(BandSlice) == 6 * sizeof(int64_t) && sizeof(TileRun) == 6 * sizeof(int32_t));
  if (slices.size() != 6 * part.size() || num_parts < 0 || tile_size < 1)
    throw std::invalid_argument("slices [A, 6] and part [A] do not fit together");
  const auto* rows = reinterpret_cast<const BandSlice*>(slices.data());
  std::vector<int64_t> begin(num_parts + 1, 0);
  int64_t last = 0;
  for (py::ssize_t i = 0; i < part.size(); ++i) {
    const int64_t p = part.data()[i];
    if (p < last || p >= num_parts) throw std::invalid_argument("part must rise within range");
    if (rows[i].q_start < 0 || rows[i].q_start >= rows[i].q_end || rows[i].q_end > length)
      throw std::invalid_argument("a slice is empty or out of range");
    last = p;
    ++begin[p + 1];
  }
  for (int64_t p = 0; p < num_parts; ++p) begin[p + 1] += begin[p];
  const TileWalks walks = WalkTiles(rows, begin, length, tile_size);
  const auto matrix = [&](const std::vector<int32_t>& values, int64_t width) {
    Array<int32_t> out({num_parts, width});
    std::copy(values.begin(), values.end(), out.mutable_data());
    return out;
  };
  return py::make_tuple(
      matrix(walks.ptr, walks.num_tiles + 1),
      Pad(reinterpret_cast<const int32_t*>(walks.runs.data()), walks.runs_before, 6),
      Pad(walks.ids.data(), walks.ids_before, 1), matrix(walks.order, walks.num_tiles));
}

}  // namespace

PYBIND11_MODULE(_planner, m) {
  m.doc() = "Compiled search of magi_jax.solver: placing units of a sequence on ranks.";
  m.def("walk_tiles", &RunWalkTiles);
  py::class_<PlacementProblem>(m, "PlacementProblem")
      .def(py::init<Array<int64_t>, Array<int32_t>, Array<int32_t>, Array<int32_t>, Array<int32_t>,
                    Array<int32_t>, Array<int32_t>, int32_t, int32_t>())
      .def("greedy", &PlacementProblem::RunGreedy)
      .def("refine", &PlacementProblem::RunRefine)
      .def("measure", &PlacementProblem::RunMeasure);
}

}  // namespace magi_jax::solver
