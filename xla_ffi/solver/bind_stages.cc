#include "xla_ffi/solver/bind_stages.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_ffi/solver/arrays.h"
#include "xla_ffi/solver/stage_times.h"

namespace magi_jax::solver {
namespace {

using Doubles = Array<double>;

// The work of one layout, from which stages are cut: see stages.py.
class StageCutter {
 public:
  // A cut (slices [B, 6], rank [B], q_offset [B]), ranges that travel [E, 7] in one stage, and the
  // layout of the keys.
  StageCutter(Ints slices, Ints rank, Ints q_offset, const Ints& remote, Ints edges, Ints owner,
              Ints offset, int64_t num_ranks, int64_t ranks_per_node)
      : slices_(std::move(slices)),
        rank_(std::move(rank)),
        q_offset_(std::move(q_offset)),
        edges_(std::move(edges)),
        owner_(std::move(owner)),
        offset_(std::move(offset)),
        layout_(LayoutOf(edges_, owner_, offset_, num_ranks)),
        ranks_per_node_(ranks_per_node),
        own_(FindOwnKeys(layout_)) {
    Require(slices_.size() == 6 * rank_.size() && q_offset_.size() == rank_.size(),
            "arrays of a cut do not fit together");
    Require(ranks_per_node >= 1, "a node has at least one rank");
    for (py::ssize_t i = 0; i < rank_.size(); ++i)
      Require(rank_.data()[i] >= 0 && rank_.data()[i] < num_ranks, "a rank is out of range");
    const auto* ranges = RowsOf<RemoteRange>(remote);
    far_.assign(ranges, ranges + remote.size() / 7);
    int64_t last = 0;
    for (RemoteRange& range : far_) {
      Require(range.dst >= last && range.dst < num_ranks, "ranges must rise by receiver");
      Require(range.src >= 0 && range.src < num_ranks, "a sender is out of range");
      range.stage = 0;
      last = range.dst;
    }
  }

  // (remote [E, 7], slices [C, 6], group [C]).
  //
  // near: in two steps, whether each stage has rows of own nodes or the others; empty for all
  // alike.
  py::tuple Cut(int64_t num_stages, bool turned, bool two_level, const std::vector<bool>& near) {
    LinkRows rows(num_stages, layout_.num_ranks);
    const std::vector<RemoteRange> far = Split(num_stages, turned, two_level, near, &rows);
    const std::vector<GroupedSlice>& home = Home().home;
    const std::vector<GroupedSlice> beyond = CutStages(Home(), far, layout_.num_ranks, num_stages);
    const auto num_pieces = static_cast<int64_t>(home.size() + beyond.size());
    Ints slices({num_pieces, int64_t{6}}), group(num_pieces);
    auto* to = reinterpret_cast<BandSlice*>(slices.mutable_data());
    int64_t* group_to = group.mutable_data();
    const auto write = [&](const std::vector<GroupedSlice>& pieces, int64_t first_group) {
      for (const GroupedSlice& piece : pieces) {
        *to++ = piece.slice;
        *group_to++ = first_group + piece.group;
      }
    };
    write(home, 0);
    write(beyond, layout_.num_ranks);
    return py::make_tuple(Table(far), slices, group);
  }

  // Kernel times of stage 0, [R] in each direction, in microseconds.
  //
  // local: further slices [A, 6] of stage 0 and their ranks [A].
  // rates: for each direction (log_keys [P], tflops [P], us_per_cell, cast_bytes, reduce_bytes,
  //   link_gbps, node_link_gbps, latency_us, launch_us, merge_us_per_row).
  std::pair<Doubles, Doubles> HomeTimes(const std::pair<Ints, Ints>& local,
                                        const std::pair<py::tuple, py::tuple>& rates) {
    const RatesOf forward(rates.first, false), backward(rates.second, true);
    KernelTimes times(layout_.num_ranks);
    for (const GroupedSlice& piece : Home().home)
      AddKernelTime(piece.slice, piece.group, forward.rates, backward.rates, &times);
    Require(local.first.size() == 6 * local.second.size(), "slices and ranks do not fit together");
    const auto* slices = RowsOf<BandSlice>(local.first);
    for (py::ssize_t i = 0; i < local.second.size(); ++i) {
      const int64_t rank = local.second.data()[i];
      Require(rank >= 0 && rank < layout_.num_ranks, "a rank is out of range");
      AddKernelTime(slices[i], rank, forward.rates, backward.rates, &times);
    }
    return {Doubles(layout_.num_ranks, times.forward_us.data()),
            Doubles(layout_.num_ranks, times.backward_us.data())};
  }

  // Predicted times (forward, backward) of stages, in microseconds.
  //
  // home: what HomeTimes gives.
  // rates: as there.
  // travel: for each direction (out, kernel, return, merge) [4, R], or None.
  std::pair<double, double> Predict(int64_t num_stages, bool turned, bool two_level,
                                    const std::vector<bool>& near,
                                    const std::pair<Doubles, Doubles>& home,
                                    const std::pair<py::tuple, py::tuple>& rates,
                                    const std::optional<std::pair<Doubles, Doubles>>& travel) {
    const int64_t num_ranks = layout_.num_ranks;
    LinkRows rows(num_stages, num_ranks);
    const std::vector<RemoteRange> far = Split(num_stages, turned, two_level, near, &rows);
    const Steps steps = {two_level, near};
    const RatesOf forward(rates.first, false), backward(rates.second, true);
    KernelTimes times((num_stages + 1) * num_ranks);
    Require(home.first.size() == num_ranks && home.second.size() == num_ranks,
            "a time of each rank is needed");
    std::copy_n(home.first.data(), num_ranks, times.forward_us.begin());
    std::copy_n(home.second.data(), num_ranks, times.backward_us.begin());
    const std::vector<GroupedSlice> pieces = CutStages(Home(), far, num_ranks, num_stages);
    for (const GroupedSlice& piece : pieces)
      AddKernelTime(piece.slice, num_ranks + piece.group, forward.rates, backward.rates, &times);
    const auto travels = [&](const Doubles& of) {
      Require(of.size() == 4 * num_ranks, "four times of each rank are needed");
      return TravelTimes{of.data(), of.data() + num_ranks, of.data() + 2 * num_ranks,
                         of.data() + 3 * num_ranks};
    };
    const TravelTimes none = {nullptr, nullptr, nullptr, nullptr};
    const std::vector<int64_t> merged = TouchedRows(pieces, num_stages * num_ranks);
    return {PredictUs(times.forward_us, merged, rows, num_ranks, num_stages, steps, forward.rates,
                      travel ? travels(travel->first) : none),
            PredictUs(times.backward_us, merged, rows, num_ranks, num_stages, steps, backward.rates,
                      travel ? travels(travel->second) : none)};
  }

  // Rows that hold each rank up, were they all in one stage: [2, R], inside the node and across.
  Ints HeldUp(bool two_level) {
    const int64_t num_ranks = layout_.num_ranks;
    LinkRows rows(1, num_ranks);
    Split(1, false, two_level, {}, &rows);
    Ints out({int64_t{2}, num_ranks});
    for (int64_t r = 0; r < num_ranks; ++r) {
      out.mutable_data()[r] = std::max(rows.near_in[r], rows.near_out[r]);
      out.mutable_data()[num_ranks + r] = std::max(rows.far_in[r], rows.far_out[r]);
    }
    return out;
  }

 private:
  // Keeps the arrays alive that Rates point into.
  struct RatesOf {
    RatesOf(const py::tuple& of, bool own_keys_last)
        : log_keys(of[0].cast<Doubles>()), tflops(of[1].cast<Doubles>()) {
      Require(log_keys.size() > 0 && log_keys.size() == tflops.size(), "rates need points");
      rates = {log_keys.data(),      tflops.data(),        log_keys.size(),
               of[2].cast<double>(), of[3].cast<double>(), of[4].cast<double>(),
               of[5].cast<double>(), of[6].cast<double>(), of[7].cast<double>(),
               of[8].cast<double>(), of[9].cast<double>(), own_keys_last};
    }
    Doubles log_keys, tflops;
    Rates rates;
  };

  std::vector<RemoteRange> Split(int64_t num_stages, bool turned, bool two_level,
                                 const std::vector<bool>& near, LinkRows* rows) {
    Require(num_stages >= 0, "there is no negative number of stages");
    const int64_t num_ranks = layout_.num_ranks;
    if (num_stages == 0) return {};
    if (two_level) {
      Require(num_ranks % ranks_per_node_ == 0, "ranks are not whole nodes");
      Require(near.empty() || static_cast<int64_t>(near.size()) == num_stages,
              "what is near must be said of each stage or of none");
      if (!near.empty()) return SplitByNode(Nodes(kOwnNodes), Nodes(kOtherNodes), near, rows);
      std::vector<int64_t> names(num_stages);
      std::iota(names.begin(), names.end(), 0);
      return SplitNodeStages(Nodes(kAllNodes), names, turned, rows);
    }
    std::vector<RemoteRange> far =
        num_stages > 1 ? SplitStages(far_, num_ranks, num_stages, turned) : far_;
    *rows = CountLinkRows(far, num_ranks, num_stages, ranks_per_node_);
    return far;
  }

  const HomeCut& Home() {
    if (!home_)
      home_ =
          CutHome({RowsOf<BandSlice>(slices_), rank_.data(), q_offset_.data(), rank_.size()}, own_);
    return *home_;
  }

  // Rows that come from own nodes, from others, or from all, found when they are first asked for.
  enum Origin { kOwnNodes, kOtherNodes, kAllNodes };
  const NodeRows& Nodes(Origin origin) {
    std::optional<NodeRows>& found = nodes_[origin];
    if (found) return *found;
    std::vector<RemoteRange> ranges;
    for (const RemoteRange& range : far_) {
      const bool own = range.src / ranks_per_node_ == range.dst / ranks_per_node_;
      if (origin == kAllNodes || own == (origin == kOwnNodes)) ranges.push_back(range);
    }
    return found.emplace(FindNodeRows(std::move(ranges), layout_.num_ranks, ranks_per_node_));
  }

  Ints slices_, rank_, q_offset_;  // of the cut
  Ints edges_, owner_, offset_;
  Layout layout_;
  int64_t ranks_per_node_;
  OwnKeys own_;
  std::vector<RemoteRange> far_;
  std::optional<HomeCut> home_;  // found when it is first asked for
  std::optional<NodeRows> nodes_[3];
};

}  // namespace

void BindStages(py::module_& m) {
  py::class_<StageCutter>(m, "StageCutter")
      .def(py::init<Ints, Ints, Ints, const Ints&, Ints, Ints, Ints, int64_t, int64_t>())
      .def("cut", &StageCutter::Cut)
      .def("home_times", &StageCutter::HomeTimes)
      .def("predict", &StageCutter::Predict)
      .def("held_up", &StageCutter::HeldUp);
}

}  // namespace magi_jax::solver
