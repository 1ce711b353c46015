#include "xla_ffi/solver/stage_times.h"

#include <algorithm>
#include <cmath>

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
  double merge_us;
  bool travels;
  double travel_out, travel_kernel, travel_return;
};

double Finish(const RankTimes& t, double last, double kernel_free, double returned) {
  const double done = t.travels ? std::max(kernel_free, returned) + t.merge_us : kernel_free;
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
    kernel_free = begin + t.kernel[stage] + (stage > 0 ? t.merge_us : 0.0);
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
    kernel_free = begin + t.kernel[stage] + t.merge_us;
    link.Move(kernel_free, t.reduce[stage - 1]);
  }
  kernel_free += t.kernel[0];
  Travel(t, visitors, &link, &kernel_free, &returned);
  return Finish(t, link.free, kernel_free, returned);
}

double InTwoSteps(const RankTimes& t, bool own_keys_last) {
  Link far, near;
  const int64_t num_stages = t.num_stages;
  double kernel_free = 0.0, visitors = 0.0, returned = 0.0, arrived = 0.0;
  double crossed[2] = {0.0, 0.0};  // of this stage and the next
  const auto local = [&] {
    kernel_free += t.kernel[0];
    Travel(t, visitors, &far, &kernel_free, &returned);
  };
  if (t.travels && !own_keys_last) visitors = far.Move(0.0, t.travel_out);
  for (int64_t stage = 0; stage < std::min<int64_t>(num_stages, 2); ++stage)
    crossed[stage] = far.Move(0.0, t.cast[stage]);
  if (t.travels && own_keys_last) visitors = far.Move(0.0, t.travel_out);
  const double before_travel = own_keys_last ? 0.0 : t.kernel[0];
  if (num_stages > 0)  // nothing hides the first step inside the node
    arrived = near.Move(std::max(before_travel, crossed[0]), t.cast_within[0]);
  if (!own_keys_last) local();
  for (int64_t stage = 1; stage <= num_stages; ++stage) {
    double begin = std::max(kernel_free, arrived);
    if (stage < num_stages) {
      // Attention waits for the start of the step that is to run beside it.
      begin = std::max(begin, crossed[1]);
      arrived = near.Move(begin, t.cast_within[stage]);
      if (stage + 1 < num_stages) crossed[1] = far.Move(begin, t.cast[stage + 1]);
    }
    kernel_free = begin + t.kernel[stage] + t.merge_us;
    far.Move(near.Move(kernel_free, t.reduce_within[stage - 1]), t.reduce[stage - 1]);
  }
  if (own_keys_last) {
    // The step inside the node of the last gradients comes before the attention over own keys.
    if (num_stages > 0) kernel_free = std::max(kernel_free, near.free);
    local();
  }
  return Finish(t, std::max(far.free, near.free), kernel_free, returned);
}

}  // namespace

void AddKernelTime(const BandSlice& slice, int64_t group, const Rates& forward,
                   const Rates& backward, KernelTimes* times) {
  const auto area = static_cast<double>(Area(slice));
  const auto rows = static_cast<double>(std::max<int64_t>(slice.q_end - slice.q_start, 1));
  const double log_keys = std::log(std::max(area / rows, 1.0));
  times->forward_us[group] += area * forward.us_per_cell / RateAt(log_keys, forward);
  times->backward_us[group] += area * backward.us_per_cell / RateAt(log_keys, backward);
}

double PredictUs(const std::vector<double>& kernel_us, const LinkRows& rows, int64_t num_ranks,
                 int64_t num_stages, bool two_steps, const Rates& rates,
                 const TravelTimes& travel) {
  const auto move_us = [&](int64_t near, int64_t far, double row_bytes) {
    if (near == 0 && far == 0) return 0.0;
    return std::max(near * row_bytes / (rates.link_gbps * 1e3),
                    far * row_bytes / (rates.node_link_gbps * 1e3)) +
           rates.latency_us;
  };
  RankTimes t;
  t.num_stages = num_stages;
  t.merge_us = rates.merge_us;
  t.travels = travel.out_us != nullptr;
  t.kernel.resize(num_stages + 1);
  t.cast.resize(num_stages);
  t.reduce = t.cast_within = t.reduce_within = t.cast;
  const bool returns = rates.reduce_bytes > 0.0;
  double last = 0.0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (int64_t stage = 0; stage <= num_stages; ++stage)
      t.kernel[stage] = kernel_us[stage * num_ranks + rank];
    for (int64_t stage = 0; stage < num_stages; ++stage) {
      const int64_t i = stage * num_ranks + rank;
      const int64_t near = std::max(rows.near_in[i], rows.near_out[i]);
      const int64_t far = std::max(rows.far_in[i], rows.far_out[i]);
      const int64_t near_beside = two_steps ? 0 : near;
      t.cast[stage] = move_us(near_beside, far, rates.cast_bytes);
      t.reduce[stage] = returns ? move_us(near_beside, far, rates.reduce_bytes) : 0.0;
      t.cast_within[stage] = move_us(near, 0, rates.cast_bytes);
      t.reduce_within[stage] = returns ? move_us(near, 0, rates.reduce_bytes) : 0.0;
    }
    if (t.travels) {
      t.travel_out = travel.out_us[rank];
      t.travel_kernel = travel.kernel_us[rank];
      t.travel_return = travel.return_us[rank];
    }
    double done = 0.0;
    if (two_steps) {
      done = InTwoSteps(t, rates.own_keys_last);
    } else {
      done = rates.own_keys_last ? BackwardInOneStep(t) : ForwardInOneStep(t);
    }
    last = std::max(last, done);
  }
  return last;
}

}  // namespace magi_jax::solver
