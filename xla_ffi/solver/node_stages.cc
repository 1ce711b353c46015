#include "xla_ffi/solver/node_stages.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace magi_jax::solver {
namespace {

// Key rows [begin, end) that a node receives, of which the first is its `place`-th distinct one.
struct Stretch {
  int64_t begin, end, place;
};

// The distinct rows of a node as stretches. Calls found(range, first, count) for each part of a
// range that no range before it has: its `first`-th to (first + count)-th distinct rows.
template <typename F>
std::vector<Stretch> DistinctRows(const std::vector<RemoteRange>& remote,
                                  std::vector<int64_t>* order, F&& found) {
  std::sort(order->begin(), order->end(), [&](int64_t a, int64_t b) {
    return remote[a].begin < remote[b].begin || (remote[a].begin == remote[b].begin && a < b);
  });
  std::vector<Stretch> out;
  int64_t place = 0;
  for (int64_t i : *order) {
    const RemoteRange& range = remote[i];
    if (out.empty() || range.begin > out.back().end)
      out.push_back({range.begin, range.begin, place});
    const int64_t count = range.end - std::max(range.begin, out.back().end);
    if (count <= 0) continue;
    found(range, place, count);
    out.back().end = range.end;
    place += count;
  }
  return out;
}

// Calls part(stage, first, count) for each stage that rows [first, first + count) fall into.
template <typename F>
void ForEachStage(const std::vector<StageCell>& cells, int64_t first, int64_t count, F&& part) {
  auto cell = std::partition_point(cells.begin(), cells.end(),
                                   [&](const StageCell& c) { return c.end <= first; });
  for (const int64_t end = first + count; first < end; ++cell) {
    const int64_t until = std::min(end, cell->end);
    part(cell->stage, first, until - first);
    first = until;
  }
}

// `SplitNodeStages` whose stages are called `names`.
std::vector<RemoteRange> SplitInto(const std::vector<int64_t>& names,
                                   const std::vector<RemoteRange>& remote, int64_t num_ranks,
                                   int64_t ranks_per_node, bool turned, LinkRows* moved) {
  const auto num_stages = static_cast<int64_t>(names.size());
  const int64_t num_nodes = num_ranks / ranks_per_node;
  std::vector<RemoteRange> out;
  std::vector<int64_t> order, filled(num_stages);
  for (int64_t node = 0, first = 0, last = 0; node < num_nodes; ++node, first = last) {
    const auto size = static_cast<int64_t>(remote.size());
    while (last < size && remote[last].dst / ranks_per_node == node) ++last;
    order.resize(last - first);
    std::iota(order.begin(), order.end(), first);

    // The cells depend on the number of distinct rows, so these are counted first.
    int64_t rows = 0;
    const auto count_rows = [&](const RemoteRange&, int64_t, int64_t count) { rows += count; };
    const std::vector<Stretch> stretches = DistinctRows(remote, &order, count_rows);
    const int64_t start = turned ? rows * node / num_nodes : 0;
    const std::vector<StageCell> cells = StageCells(rows, start, num_stages);
    const auto relay_of = [&](int64_t src) { return node * ranks_per_node + src % ranks_per_node; };
    DistinctRows(remote, &order, [&](const RemoteRange& range, int64_t place, int64_t count) {
      if (range.src / ranks_per_node == node) return;  // the owner is the relay
      ForEachStage(cells, place, count, [&](int64_t stage, int64_t, int64_t part) {
        stage = names[stage];
        moved->far_in[stage * num_ranks + relay_of(range.src)] += part;
        moved->far_out[stage * num_ranks + range.src] += part;
      });
    });

    for (int64_t i = first; i < last; ++i) {
      const RemoteRange& range = remote[i];
      if (i == first || remote[i - 1].dst != range.dst) std::fill(filled.begin(), filled.end(), 0);
      const Stretch& stretch =
          *(std::partition_point(stretches.begin(), stretches.end(),
                                 [&](const Stretch& s) { return s.begin <= range.begin; }) -
            1);
      const int64_t place = stretch.place + range.begin - stretch.begin;
      ForEachStage(cells, place, range.end - range.begin,
                   [&](int64_t stage, int64_t at, int64_t part) {
                     const int64_t skipped = at - place, begin = range.begin + skipped;
                     out.push_back({range.dst, range.src, begin, begin + part,
                                    range.src_row + skipped, names[stage], filled[stage]});
                     filled[stage] += part;
                     stage = names[stage];
                     const int64_t relay = relay_of(range.src);
                     if (relay == range.dst) return;
                     moved->near_in[stage * num_ranks + range.dst] += part;
                     moved->near_out[stage * num_ranks + relay] += part;
                   });
    }
  }
  return out;
}

}  // namespace

LinkRows CountLinkRows(const std::vector<RemoteRange>& remote, int64_t num_ranks,
                       int64_t num_stages, int64_t ranks_per_node) {
  LinkRows out(num_stages, num_ranks);
  for (const RemoteRange& range : remote) {
    const bool near = range.src / ranks_per_node == range.dst / ranks_per_node;
    const int64_t rows = range.end - range.begin, base = range.stage * num_ranks;
    (near ? out.near_in : out.far_in)[base + range.dst] += rows;
    (near ? out.near_out : out.far_out)[base + range.src] += rows;
  }
  return out;
}

std::vector<RemoteRange> SplitNodeStages(const std::vector<RemoteRange>& remote, int64_t num_ranks,
                                         int64_t num_stages, int64_t ranks_per_node, bool turned,
                                         LinkRows* moved) {
  std::vector<int64_t> names(num_stages);
  std::iota(names.begin(), names.end(), 0);
  return SplitInto(names, remote, num_ranks, ranks_per_node, turned, moved);
}

std::vector<RemoteRange> SplitByNode(const std::vector<RemoteRange>& remote, int64_t num_ranks,
                                     const std::vector<bool>& near, int64_t ranks_per_node,
                                     LinkRows* moved) {
  std::vector<RemoteRange> parts[2];
  for (const bool kind : {true, false}) {
    std::vector<int64_t> names;
    for (size_t stage = 0; stage < near.size(); ++stage)
      if (near[stage] == kind) names.push_back(static_cast<int64_t>(stage));
    std::vector<RemoteRange> rows;
    for (const RemoteRange& range : remote)
      if ((range.src / ranks_per_node == range.dst / ranks_per_node) == kind) rows.push_back(range);
    if (rows.empty()) continue;
    if (names.empty())
      throw std::invalid_argument(kind ? "no stage has the rows of own nodes"
                                       : "no stage has the rows of other nodes");
    parts[kind] = SplitInto(names, rows, num_ranks, ranks_per_node, false, moved);
  }
  std::vector<RemoteRange> out(parts[0].size() + parts[1].size());
  std::merge(parts[0].begin(), parts[0].end(), parts[1].begin(), parts[1].end(), out.begin(),
             [](const RemoteRange& a, const RemoteRange& b) {
               return a.dst < b.dst || (a.dst == b.dst && a.begin < b.begin);
             });
  return out;
}

}  // namespace magi_jax::solver
