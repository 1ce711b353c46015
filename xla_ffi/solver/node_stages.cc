#include "xla_ffi/solver/node_stages.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace magi_jax::solver {
namespace {

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

NodeRows FindNodeRows(std::vector<RemoteRange> remote, int64_t num_ranks, int64_t ranks_per_node) {
  NodeRows out = {num_ranks, ranks_per_node, std::move(remote), {}, {}, {0}, {0}, {}};
  const auto size = static_cast<int64_t>(out.ranges.size());
  out.place.resize(size);
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t node = 0, last = 0; node < num_ranks / ranks_per_node; ++node) {
    const int64_t first = last;
    while (last < size && out.ranges[last].dst / ranks_per_node == node) ++last;
    std::sort(order.begin() + first, order.begin() + last, [&](int64_t a, int64_t b) {
      const RemoteRange &x = out.ranges[a], &y = out.ranges[b];
      return x.begin < y.begin || (x.begin == y.begin && a < b);
    });
    // Rows of the node from `stretch` on, without a gap up to `end`.
    int64_t rows = 0, stretch = 0, before = 0, end = -1;
    for (int64_t k = first; k < last; ++k) {
      const RemoteRange& range = out.ranges[order[k]];
      if (range.begin > end) stretch = end = range.begin, before = rows;
      out.place[order[k]] = before + range.begin - stretch;
      const int64_t count = range.end - end;
      if (count <= 0) continue;
      out.fresh.push_back({range.src, rows, count});
      rows += count;
      end = range.end;
    }
    out.rows.push_back(rows);
    out.range_ptr.push_back(last);
    out.fresh_ptr.push_back(static_cast<int64_t>(out.fresh.size()));
  }
  return out;
}

std::vector<RemoteRange> SplitNodeStages(const NodeRows& rows, const std::vector<int64_t>& names,
                                         bool turned, LinkRows* moved) {
  const int64_t num_ranks = rows.num_ranks, per_node = rows.ranks_per_node;
  const auto num_stages = static_cast<int64_t>(names.size());
  const auto num_nodes = static_cast<int64_t>(rows.rows.size());
  std::vector<RemoteRange> out;
  out.reserve(rows.ranges.size() + rows.ranges.size() / 4);
  std::vector<int64_t> filled(num_stages);
  for (int64_t node = 0; node < num_nodes; ++node) {
    const int64_t start = turned ? rows.rows[node] * node / num_nodes : 0;
    const std::vector<StageCell> cells = StageCells(rows.rows[node], start, num_stages);
    const auto relay_of = [&](int64_t src) { return node * per_node + src % per_node; };
    for (int64_t i = rows.fresh_ptr[node]; i < rows.fresh_ptr[node + 1]; ++i) {
      const NodeRows::Fresh& fresh = rows.fresh[i];
      if (fresh.src / per_node == node) continue;  // the owner is the relay
      ForEachStage(cells, fresh.place, fresh.count, [&](int64_t stage, int64_t, int64_t part) {
        moved->far_in[names[stage] * num_ranks + relay_of(fresh.src)] += part;
        moved->far_out[names[stage] * num_ranks + fresh.src] += part;
      });
    }
    for (int64_t i = rows.range_ptr[node]; i < rows.range_ptr[node + 1]; ++i) {
      const RemoteRange& range = rows.ranges[i];
      if (i == rows.range_ptr[node] || rows.ranges[i - 1].dst != range.dst)
        std::fill(filled.begin(), filled.end(), 0);
      const int64_t place = rows.place[i], relay = relay_of(range.src);
      const auto part_of = [&](int64_t stage, int64_t at, int64_t part) {
        const int64_t skipped = at - place, begin = range.begin + skipped;
        out.push_back({range.dst, range.src, begin, begin + part, range.src_row + skipped,
                       names[stage], filled[stage]});
        filled[stage] += part;
        if (relay == range.dst) return;
        moved->near_in[names[stage] * num_ranks + range.dst] += part;
        moved->near_out[names[stage] * num_ranks + relay] += part;
      };
      ForEachStage(cells, place, range.end - range.begin, part_of);
    }
  }
  return out;
}

std::vector<RemoteRange> SplitByNode(const NodeRows& own_nodes, const NodeRows& other_nodes,
                                     const std::vector<bool>& near, LinkRows* moved) {
  std::vector<RemoteRange> parts[2];
  for (const bool kind : {true, false}) {
    std::vector<int64_t> names;
    for (size_t stage = 0; stage < near.size(); ++stage)
      if (near[stage] == kind) names.push_back(static_cast<int64_t>(stage));
    const NodeRows& rows = kind ? own_nodes : other_nodes;
    if (rows.ranges.empty()) continue;
    if (names.empty())
      throw std::invalid_argument(kind ? "no stage has the rows of own nodes"
                                       : "no stage has the rows of other nodes");
    parts[kind] = SplitNodeStages(rows, names, false, moved);
  }
  std::vector<RemoteRange> out(parts[0].size() + parts[1].size());
  std::merge(parts[0].begin(), parts[0].end(), parts[1].begin(), parts[1].end(), out.begin(),
             [](const RemoteRange& a, const RemoteRange& b) {
               return a.dst < b.dst || (a.dst == b.dst && a.begin < b.begin);
             });
  return out;
}

}  // namespace magi_jax::solver
