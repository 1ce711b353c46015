#include "xla_ffi/solver/lay_out.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace magi_jax::solver {
namespace {

// First segment that ends after `position`.
int64_t SegmentAt(const Layout& layout, int64_t position) {
  return std::upper_bound(layout.edges + 1, layout.edges + layout.num_segments + 1, position) -
         (layout.edges + 1);
}

// Received ranges that abut, globally and so in the buffer, become one segment.
void AppendReceived(const RemoteRange* first, const RemoteRange* last,
                    std::vector<KeySegment>* segments) {
  for (const RemoteRange* range = first; range != last; ++range) {
    if (range != first && range->stage == range[-1].stage && range->begin == range[-1].end) {
      segments->back().end = range->end;
    } else {
      segments->push_back(
          {range->begin, range->end, range->stage + 1, range->dst_row - range->begin});
    }
  }
}

}  // namespace

std::vector<StageCell> StageCells(int64_t rows, int64_t start, int64_t num_stages) {
  std::vector<StageCell> cells;
  for (int64_t stage = 0; stage < num_stages; ++stage) {
    const int64_t begin = start + rows * stage / num_stages;
    const int64_t end = start + rows * (stage + 1) / num_stages;
    const int64_t beyond = std::max<int64_t>(end - std::max(begin, rows), 0);
    if (beyond > 0) cells.push_back({end - beyond - rows, end - rows, stage, 0});
    if (begin < std::min(end, rows)) cells.push_back({begin, std::min(end, rows), stage, beyond});
  }
  std::sort(cells.begin(), cells.end(),
            [](const StageCell& a, const StageCell& b) { return a.begin < b.begin; });
  return cells;
}

QueryCut CutQueries(const BandSlice* slices, int64_t num_slices, const Layout& layout) {
  std::vector<std::vector<std::pair<BandSlice, int64_t>>> by_rank(layout.num_ranks);
  for (int64_t i = 0; i < num_slices; ++i) {
    for (int64_t g = SegmentAt(layout, slices[i].q_start);
         g < layout.num_segments && layout.edges[g] < slices[i].q_end; ++g) {
      const BandSlice cut = ClipQueries(slices[i], layout.edges[g], layout.edges[g + 1]);
      if (cut.visible()) by_rank[layout.owner[g]].push_back({cut, layout.offset[g]});
    }
  }
  QueryCut out;
  for (int64_t rank = 0; rank < layout.num_ranks; ++rank) {
    for (const auto& [slice, offset] : by_rank[rank]) {
      out.slices.push_back(slice);
      out.rank.push_back(rank);
      out.q_offset.push_back(offset);
    }
  }
  return out;
}

std::vector<RemoteRange> FindRemote(const QueryCut& cut, const Layout& layout) {
  std::vector<RemoteRange> out;
  std::vector<std::pair<int64_t, int64_t>> keys;
  for (size_t first = 0, last = 0; first < cut.slices.size(); first = last) {
    const int64_t rank = cut.rank[first];
    keys.clear();
    for (; last < cut.slices.size() && cut.rank[last] == rank; ++last)
      keys.push_back({cut.slices[last].k_start, cut.slices[last].k_end});
    std::sort(keys.begin(), keys.end());
    int64_t dst_row = 0;
    for (size_t i = 0; i < keys.size();) {
      const int64_t begin = keys[i].first;
      int64_t end = keys[i].second;
      for (++i; i < keys.size() && keys[i].first <= end; ++i) end = std::max(end, keys[i].second);
      for (int64_t g = SegmentAt(layout, begin); g < layout.num_segments && layout.edges[g] < end;
           ++g) {
        if (layout.owner[g] == rank) continue;
        const int64_t low = std::max(begin, layout.edges[g]);
        const int64_t high = std::min(end, layout.edges[g + 1]);
        out.push_back({rank, layout.owner[g], low, high, low + layout.offset[g], 0, dst_row});
        dst_row += high - low;
      }
    }
  }
  return out;
}

std::vector<RemoteRange> SplitStages(const std::vector<RemoteRange>& remote, int64_t num_ranks,
                                     int64_t num_stages, bool turned) {
  std::vector<int64_t> rows(num_ranks, 0);
  for (const RemoteRange& range : remote) rows[range.dst] += range.end - range.begin;
  std::vector<RemoteRange> out;
  std::vector<StageCell> cells;
  auto cell = cells.begin();
  for (size_t i = 0; i < remote.size(); ++i) {
    const RemoteRange& range = remote[i];
    if (i == 0 || remote[i - 1].dst != range.dst) {
      const int64_t start = turned ? rows[range.dst] * range.dst / num_ranks : 0;
      cells = StageCells(rows[range.dst], start, num_stages);
      cell = cells.begin();
    }
    const int64_t range_end = range.dst_row + range.end - range.begin;
    for (int64_t row = range.dst_row; row < range_end;) {
      while (cell->end <= row) ++cell;
      const int64_t end = std::min(range_end, cell->end), skipped = row - range.dst_row;
      out.push_back({range.dst, range.src, range.begin + skipped, range.begin + skipped + end - row,
                     range.src_row + skipped, cell->stage, row - cell->begin + cell->offset});
      row = end;
    }
  }
  return out;
}

OwnKeys FindOwnKeys(const Layout& layout) {
  OwnKeys out;
  out.ptr.assign(layout.num_ranks + 1, 0);
  for (int64_t g = 0; g < layout.num_segments; ++g) ++out.ptr[layout.owner[g] + 1];
  std::partial_sum(out.ptr.begin(), out.ptr.end(), out.ptr.begin());
  out.segments.resize(layout.num_segments);
  std::vector<int64_t> place(out.ptr.begin(), out.ptr.end() - 1);
  for (int64_t g = 0; g < layout.num_segments; ++g)
    out.segments[place[layout.owner[g]]++] = {layout.edges[g], layout.edges[g + 1], 0,
                                              layout.offset[g]};
  return out;
}

std::vector<GroupedSlice> CutStages(const QueryCut& cut, const std::vector<RemoteRange>& remote,
                                    const OwnKeys& own, int64_t num_remote_stages) {
  const auto num_ranks = static_cast<int64_t>(own.ptr.size()) - 1;
  std::vector<GroupedSlice> pieces;
  pieces.reserve(2 * cut.slices.size());
  std::vector<KeySegment> received, segments;
  const RemoteRange* range = remote.data();
  const RemoteRange* const ranges_end = range + remote.size();
  for (size_t first = 0, last = 0; first < cut.slices.size(); first = last) {
    const int64_t rank = cut.rank[first];
    while (range != ranges_end && range->dst < rank) ++range;
    const RemoteRange* from = range;
    while (range != ranges_end && range->dst == rank) ++range;
    received.clear();
    AppendReceived(from, range, &received);
    const auto mine = own.segments.begin() + own.ptr[rank];
    const auto mine_end = own.segments.begin() + own.ptr[rank + 1];
    segments.resize(received.size() + (mine_end - mine));
    std::merge(mine, mine_end, received.begin(), received.end(), segments.begin(),
               [](const KeySegment& a, const KeySegment& b) { return a.begin < b.begin; });
    for (; last < cut.slices.size() && cut.rank[last] == rank; ++last) {
      const BandSlice& slice = cut.slices[last];
      auto segment =
          std::partition_point(segments.begin(), segments.end(),
                               [&](const KeySegment& s) { return s.end <= slice.k_start; });
      for (; segment != segments.end() && segment->begin < slice.k_end; ++segment) {
        const BandSlice piece = ClipKeys(slice, segment->begin, segment->end);
        if (piece.visible())
          pieces.push_back({Shift(piece, cut.q_offset[last], segment->k_offset),
                            segment->stage * num_ranks + rank});
      }
    }
  }
  return JoinRectangles(pieces, (num_remote_stages + 1) * num_ranks);
}

}  // namespace magi_jax::solver
