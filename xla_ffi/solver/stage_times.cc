#include "xla_ffi/solver/stage_times.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace magi_jax::solver {
namespace {

// TFLOP/s at so many keys per row: between the points rates follow the logarithm.
double RateAt(double log_keys, const Rates& rates) {
  const double *x = rates.log_keys, *y = rates.tflops;
  const int64_t n = rates.num_points;
  if (log_keys <= x[0]) return y[0];
  if (log_keys >= x[n - 1]) return y[n - 1];
  const int64_t i = std::upper_bound(x, x + n, log_keys) - x - 1;
  return (y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (log_keys - x[i]) + y[i];
}

// A stream of transfers: one after the other.
struct Link {
  double free = 0.0;
  double Move(double start, double length_us) { return free = std::max(free, start) + length_us; }
};

// One rank's times, and when the last of them ends. Stage 0 is local; stages are counted from 1.
struct RankTimes {
  int64_t num_stages;
  std::vector<double> kernel, cast, reduce;  // [1 + S], [S], [S]
  std::vector<double> cast_within, reduce_within;
  std::vector<double> merge;  // [1 + S], of stage 0 nothing
  bool travels;
  double travel_out, travel_kernel, travel_return, travel_merge;
};

double Finish(const RankTimes& t, double last, double kernel_free, double returned) {
  const double done = t.travels ? std::max(kernel_free, returned) + t.travel_merge : kernel_free;
  return std::max(last, done);
}

// The queries that came are computed, and their results leave.
void Travel(const RankTimes& t, double arrived, Link* link, double* kernel_free, double* returned) {
  if (!t.travels) return;
  *kernel_free = std::max(*kernel_free, arrived) + t.travel_kernel;
  *returned = link->Move(*kernel_free, t.travel_return);
}

double ForwardInOneStep(const RankTimes& t) {
  Link link;
  double arrived = 0.0, kernel_free = 0.0, last = 0.0, returned = 0.0;
  const double visitors = t.travels ? link.Move(0.0, t.travel_out) : 0.0;
  for (int64_t stage = 0; stage <= t.num_stages; ++stage) {
    const double begin = std::max(kernel_free, arrived);
    kernel_free = begin + t.kernel[stage] + t.merge[stage];
    if (stage < t.num_stages) arrived = link.Move(begin, t.cast[stage]);
    if (stage == 0) Travel(t, visitors, &link, &kernel_free, &returned);
    if (stage > 0) last = link.Move(kernel_free, t.reduce[stage - 1]);
  }
  return Finish(t, std::max(last, link.free), kernel_free, returned);
}

double BackwardInOneStep(const RankTimes& t) {
  Link link;
  double arrived = 0.0, kernel_free = 0.0, returned = 0.0;
  if (t.num_stages > 0) arrived = link.Move(0.0, t.cast[0]);
  const double visitors = t.travels ? link.Move(0.0, t.travel_out) : 0.0;
  for (int64_t stage = 1; stage <= t.num_stages; ++stage) {
    const double begin = std::max(kernel_free, arrived);
    if (stage < t.num_stages) arrived = link.Move(begin, t.cast[stage]);
    kernel_free = begin + t.kernel[stage] + t.merge[stage];
    link.Move(kernel_free, t.reduce[stage - 1]);
  }
  kernel_free += t.kernel[0];
  Travel(t, visitors, &link, &kernel_free, &returned);
  return Finish(t, link.free, kernel_free, returned);
}

double InTwoSteps(const RankTimes& t, const std::vector<bool>& near_stages, bool own_keys_last) {
  Link far, near;
  const int64_t num_stages = t.num_stages;
  double kernel_free = 0.0, visitors = 0.0, returned = 0.0, arrived = 0.0;
  const auto is_near = [&](int64_t stage) { return !near_stages.empty() && near_stages[stage]; };
  std::vector<double> crossed(num_stages, 0.0);
  int64_t next = 0;
  // Rows of the next stage that has any to cross between nodes.
  const auto cross = [&](double start) {
    while (next < num_stages && is_near(next)) ++next;
    if (next < num_stages) crossed[next] = far.Move(start, t.cast[next]);
    ++next;
  };
  const auto local = [&] {
    kernel_free += t.kernel[0];
    Travel(t, visitors, &far, &kernel_free, &returned);
  };
  const bool begins_near = num_stages > 0 && is_near(0);
  if (t.travels && !own_keys_last) visitors = far.Move(0.0, t.travel_out);
  if (begins_near) arrived = near.Move(0.0, t.cast_within[0]);
  cross(0.0);
  if (!begins_near) cross(0.0);
  if (t.travels && own_keys_last) visitors = far.Move(0.0, t.travel_out);
  const double before_travel = own_keys_last ? 0.0 : t.kernel[0];
  if (num_stages > 0 && !begins_near)  // nothing hides the first step inside the node
    arrived = near.Move(std::max(before_travel, crossed[0]), t.cast_within[0]);
  if (!own_keys_last) local();
  double left = 0.0;  // when the latest gradients have moved inside nodes
  for (int64_t stage = 1; stage <= num_stages; ++stage) {
    double begin = std::max(kernel_free, arrived);
    if (stage < num_stages) {
      // Attention waits for the start of the step that is to run beside it.
      if (!is_near(stage)) begin = std::max(begin, crossed[stage]);
      arrived = near.Move(begin, t.cast_within[stage]);
      if (!is_near(stage)) cross(begin);
    }
    kernel_free = begin + t.kernel[stage] + t.merge[stage];
    if (!own_keys_last) continue;
    if (stage > 1) {  // what ran beside it is taken before what it gave is sent
      kernel_free = std::max(kernel_free, left);
      if (!is_near(stage - 2)) far.Move(kernel_free, t.reduce[stage - 2]);
    }
    left = near.Move(kernel_free, t.reduce_within[stage - 1]);
  }
  if (own_keys_last) {
    // The step inside the node of the last gradients comes before the attention over own keys.
    if (num_stages > 0 && !is_near(num_stages - 1)) {
      kernel_free = std::max(kernel_free, left);
      far.Move(kernel_free, t.reduce[num_stages - 1]);
    }
    local();
  }
  return Finish(t, std::max(far.free, near.free), kernel_free, returned);
}

}  // namespace

void AddKernelTime(const BandSlice& slice, int64_t group, const Rates& forward,
                   const Rates& backward, KernelTimes* times) {
  const auto area = static_cast<double>(Area(slice));
  const auto rows = static_cast<double>(std::max<int64_t>(slice.q_end - slice.q_start, 1));
  if (area != times->last.area || rows != times->last.rows) {
    const double log_keys = std::log(std::max(area / rows, 1.0));
    times->last = {area, rows, area * forward.us_per_cell / RateAt(log_keys, forward),
                   area * backward.us_per_cell / RateAt(log_keys, backward)};
  }
  times->forward_us[group] += times->last.forward_us;
  times->backward_us[group] += times->last.backward_us;
}

std::vector<int64_t> TouchedRows(const std::vector<GroupedSlice>& pieces, int64_t num_groups) {
  std::vector<int64_t> rows(num_groups, 0);
  std::vector<std::pair<int64_t, int64_t>> tiles;
  for (size_t first = 0, last = 0; first < pieces.size(); first = last) {
    const int64_t group = pieces[first].group;
    tiles.clear();
    for (; last < pieces.size() && pieces[last].group == group; ++last) {
      const BandSlice& s = pieces[last].slice;
      tiles.push_back({s.q_start / kMergeTile, (s.q_end + kMergeTile - 1) / kMergeTile});
    }
    std::sort(tiles.begin(), tiles.end());
    int64_t until = 0;
    for (const auto& [begin, end] : tiles) {
      rows[group] += kMergeTile * std::max<int64_t>(end - std::max(begin, until), 0);
      until = std::max(until, end);
    }
  }
  return rows;
}

double PredictUs(const std::vector<double>& kernel_us, const std::vector<int64_t>& merged_rows,
                 const LinkRows& rows, int64_t num_ranks, int64_t num_stages, const Steps& steps,
                 const Rates& rates, const TravelTimes& travel) {
  const auto move_us = [&](int64_t near, int64_t far, double row_bytes) {
    if (near == 0 && far == 0) return 0.0;
    return std::max(near * row_bytes / (rates.link_gbps * 1e3),
                    far * row_bytes / (rates.node_link_gbps * 1e3)) +
           rates.latency_us;
  };
  RankTimes t = {};
  t.num_stages = num_stages;
  t.travels = travel.out_us != nullptr;
  t.kernel.resize(num_stages + 1);
  t.merge.assign(num_stages + 1, 0.0);
  t.cast.resize(num_stages);
  t.reduce = t.cast_within = t.reduce_within = t.cast;
  const bool returns = rates.reduce_bytes > 0.0;
  double last = 0.0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (int64_t stage = 0; stage <= num_stages; ++stage)
      t.kernel[stage] = kernel_us[stage * num_ranks + rank];
    for (int64_t stage = 0; stage < num_stages; ++stage) {
      const int64_t i = stage * num_ranks + rank;
      t.merge[stage + 1] = rates.launch_us + merged_rows[i] * rates.merge_us_per_row;
      const int64_t near = std::max(rows.near_in[i], rows.near_out[i]);
      const int64_t far = std::max(rows.far_in[i], rows.far_out[i]);
      const int64_t near_beside = steps.two ? 0 : near;
      t.cast[stage] = move_us(near_beside, far, rates.cast_bytes);
      t.reduce[stage] = returns ? move_us(near_beside, far, rates.reduce_bytes) : 0.0;
      t.cast_within[stage] = move_us(near, 0, rates.cast_bytes);
      t.reduce_within[stage] = returns ? move_us(near, 0, rates.reduce_bytes) : 0.0;
    }
    if (t.travels) {
      t.travel_out = travel.out_us[rank];
      t.travel_kernel = travel.kernel_us[rank];
      t.travel_return = travel.return_us[rank];
      t.travel_merge = travel.merge_us[rank];
    }
    double done = 0.0;
    if (steps.two) {
      done = InTwoSteps(t, steps.near, rates.own_keys_last);
    } else {
      done = rates.own_keys_last ? BackwardInOneStep(t) : ForwardInOneStep(t);
    }
    last = std::max(last, done);
  }
  return last;
}

}  // namespace magi_jax::solver
