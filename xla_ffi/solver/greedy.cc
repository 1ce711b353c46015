// One pass over the units, heaviest first: each goes to the rank where area and new key rows cost
// least.

#include <algorithm>
#include <limits>

#include "xla_ffi/solver/problem.h"

namespace magi_jax::solver {
namespace {

// Which ranks (or nodes) need each span already, as a short list per span: most spans have few.
class Holders {
 public:
  Holders(const Problem& problem, int32_t num_groups)
      : problem_(problem),
        num_groups_(num_groups),
        count_(problem.num_spans, 0),
        list_(static_cast<size_t>(problem.num_spans) * num_groups),
        holds_(static_cast<size_t>(problem.num_spans) * num_groups, 0),
        held_rows(num_groups, 0),
        new_rows(num_groups, 0) {}

  // Rows of `unit` that each group does not hold yet, into new_rows.
  void Price(int32_t unit) {
    int64_t total = 0;
    std::fill(new_rows.begin(), new_rows.end(), 0);
    ForEachNeed(unit, [&](int32_t span) {
      const int64_t rows = problem_.rows[span];
      total += rows;
      const int32_t* list = list_.data() + static_cast<size_t>(span) * num_groups_;
      for (int32_t i = 0; i < count_[span]; ++i) new_rows[list[i]] -= rows;
    });
    for (int64_t& rows : new_rows) rows += total;
  }

  // Rows of the unit's own spans, once per group that needs them already.
  int64_t Wanted(int32_t unit) const {
    int64_t rows = 0;
    for (int32_t v = problem_.span_ptr[unit]; v < problem_.span_ptr[unit + 1]; ++v)
      rows += static_cast<int64_t>(problem_.rows[v]) * count_[v];
    return rows;
  }

  void Add(int32_t unit, int32_t group) {
    ForEachNeed(unit, [&](int32_t span) {
      const size_t base = static_cast<size_t>(span) * num_groups_;
      if (holds_[base + group]) return;
      holds_[base + group] = 1;
      list_[base + count_[span]++] = group;
      held_rows[group] += problem_.rows[span];
    });
  }

 private:
  template <typename F>
  void ForEachNeed(int32_t unit, F&& f) {
    for (int32_t i = problem_.need_ptr[unit]; i < problem_.need_ptr[unit + 1]; ++i)
      for (int32_t v = problem_.needs[i].begin; v < problem_.needs[i].end; ++v) f(v);
  }

  const Problem& problem_;
  const int32_t num_groups_;
  std::vector<int32_t> count_;  // [V]
  std::vector<int32_t> list_;   // [V, groups]
  std::vector<uint8_t> holds_;  // [V, groups]

 public:
  std::vector<int64_t> held_rows;  // [groups]
  std::vector<int64_t> new_rows;   // [groups]
};

constexpr double kRankOverload = 100.0;  // slopes past the limits, in means of area
constexpr double kNodeOverload = 20.0;

}  // namespace

bool Greedy(const Problem& problem, const int32_t* order, const Capacity& capacity,
            const GreedyWeights& weights, const int32_t* node, int32_t* owner) {
  const int32_t num_ranks = problem.num_ranks, per_node = problem.ranks_per_node;
  Holders ranks(problem, num_ranks), nodes(problem, problem.num_nodes());
  std::vector<int32_t> node_of(num_ranks);
  for (int32_t r = 0; r < num_ranks; ++r) node_of[r] = problem.node(r);
  const int32_t num_nodes = problem.num_nodes();
  std::vector<int64_t> area(num_ranks, 0), node_area(num_nodes, 0);
  std::vector<int64_t> room(num_ranks, capacity.tokens), sent(num_ranks, 0);
  std::vector<int32_t> spares(num_ranks, 0);
  std::vector<double> node_cost(num_nodes);
  int64_t total_area = 0, total_rows = 0;
  for (int32_t u = 0; u < problem.num_units; ++u) total_area += problem.area[u];
  for (int32_t v = 0; v < problem.num_spans; ++v) total_rows += problem.rows[v];
  const double per_area = 1.0 / std::max(static_cast<double>(total_area) / num_ranks, 1.0);
  const double per_node_area = per_area / per_node;
  const double per_row = weights.volume * num_ranks / std::max<double>(total_rows, 1.0);
  const double light_per_token = capacity.light_area / capacity.slot * per_area;
  int32_t part_slots = capacity.part_slots;

  for (int32_t i = 0; i < problem.num_units; ++i) {
    const int32_t unit = order[i], size = problem.size[unit];
    const bool whole = size == capacity.slot;
    ranks.Price(unit);
    nodes.Price(unit);
    const int64_t wanted = ranks.Wanted(unit);
    for (int32_t n = 0; n < num_nodes; ++n) {
      const double y = static_cast<double>(node_area[n] + problem.area[unit]) * per_node_area;
      const double rows = nodes.new_rows[n] + weights.node_held * nodes.held_rows[n];
      node_cost[n] = per_row * weights.node * rows + kNodeOverload * std::max(y - 1.0, 0.0);
    }
    int32_t best = -1;
    double best_cost = std::numeric_limits<double>::infinity();
    const int32_t begin = node ? node[unit] * per_node : 0;
    const int32_t end = node ? begin + per_node : num_ranks;
    for (int32_t r = begin; r < end; ++r) {
      const bool fits =
          whole ? room[r] >= size
                : room[r] % capacity.slot >= size || (part_slots > 0 && room[r] >= capacity.slot);
      if (!fits || (problem.spare[unit] && spares[r])) continue;
      const double x = static_cast<double>(area[r] + problem.area[unit]) * per_area;
      const double rows =
          ranks.new_rows[r] + weights.held * ranks.held_rows[r] + weights.sent * (sent[r] + wanted);
      const double light = light_per_token * (room[r] - size);
      const double overload = kRankOverload * std::max(x + light - weights.area_limit, 0.0);
      const double cost = per_row * rows + x + overload + node_cost[node_of[r]];
      if (cost < best_cost) best_cost = cost, best = r;
    }
    if (best < 0) return false;
    if (!whole && room[best] % capacity.slot < size) --part_slots;
    room[best] -= size;
    spares[best] += problem.spare[unit];
    sent[best] += wanted;
    area[best] += problem.area[unit];
    node_area[node_of[best]] += problem.area[unit];
    ranks.Add(unit, best);
    nodes.Add(unit, node_of[best]);
    owner[unit] = best;
  }
  return true;
}

}  // namespace magi_jax::solver
