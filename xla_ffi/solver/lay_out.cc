#include "xla_ffi/solver/lay_out.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace magi_jax::solver {
namespace {

// First segment that ends after `position`.
int64_t SegmentAt(const Layout& layout, int64_t position) {
  return std::upper_bound(layout.edges + 1, layout.edges + layout.num_segments + 1, position) -
         (layout.edges + 1);
}

// Keys that lie together in one buffer of a rank.
struct KeySegment {
  int64_t begin, end, stage, k_offset;
};

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

// Full rectangles first, by keys, then by queries; order[i] breaks ties, so that the sort is
// stable.
void SortForJoining(const std::vector<StagePiece>& pieces, int64_t* first, int64_t* last) {
  std::sort(first, last, [&](int64_t a, int64_t b) {
    const BandSlice &x = pieces[a].slice, &y = pieces[b].slice;
    return std::make_tuple(!x.full(), x.k_start, x.k_end, x.q_start, a) <
           std::make_tuple(!y.full(), y.k_start, y.k_end, y.q_start, b);
  });
}

// Groups pieces (counting sort), and joins full rectangles that abut in queries over the same keys.
StageSlices JoinRectangles(const std::vector<StagePiece>& pieces, int64_t num_groups) {
  std::vector<int64_t> ptr(num_groups + 1, 0), order(pieces.size());
  for (const StagePiece& piece : pieces) ++ptr[piece.group + 1];
  std::partial_sum(ptr.begin(), ptr.end(), ptr.begin());
  std::vector<int64_t> place(ptr.begin(), ptr.end() - 1);
  for (size_t i = 0; i < pieces.size(); ++i) order[place[pieces[i].group]++] = i;
  StageSlices out;
  out.slices.reserve(pieces.size());
  out.group.reserve(pieces.size());
  for (int64_t group = 0; group < num_groups; ++group) {
    SortForJoining(pieces, order.data() + ptr[group], order.data() + ptr[group + 1]);
    const size_t group_begin = out.slices.size();
    for (int64_t i = ptr[group]; i < ptr[group + 1]; ++i) {
      const BandSlice& slice = pieces[order[i]].slice;
      if (out.slices.size() > group_begin) {
        BandSlice& last = out.slices.back();
        if (slice.full() && last.full() && slice.k_start == last.k_start &&
            slice.k_end == last.k_end && slice.q_start == last.q_end) {
          last.q_end = slice.q_end;
          last.d_min = std::min(last.d_min, slice.d_min);
          continue;
        }
      }
      out.slices.push_back(slice);
      out.group.push_back(group);
    }
  }
  return out;
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

std::vector<StagePiece> CutPieces(const QueryCut& cut, const std::vector<RemoteRange>& remote,
                                  const Layout& layout) {
  std::vector<std::vector<KeySegment>> own(layout.num_ranks);
  for (int64_t g = 0; g < layout.num_segments; ++g)
    own[layout.owner[g]].push_back({layout.edges[g], layout.edges[g + 1], 0, layout.offset[g]});
  std::vector<StagePiece> pieces;
  pieces.reserve(2 * cut.slices.size());
  std::vector<KeySegment> segments;
  const RemoteRange* range = remote.data();
  const RemoteRange* const ranges_end = range + remote.size();
  for (size_t first = 0, last = 0; first < cut.slices.size(); first = last) {
    const int64_t rank = cut.rank[first];
    segments = own[rank];
    while (range != ranges_end && range->dst < rank) ++range;
    const RemoteRange* received = range;
    while (range != ranges_end && range->dst == rank) ++range;
    AppendReceived(received, range, &segments);
    std::inplace_merge(segments.begin(), segments.begin() + own[rank].size(), segments.end(),
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
                            segment->stage * layout.num_ranks + rank});
      }
    }
  }
  return pieces;
}

StageSlices CutStages(const QueryCut& cut, const std::vector<RemoteRange>& remote,
                      const Layout& layout, int64_t num_remote_stages) {
  return JoinRectangles(CutPieces(cut, remote, layout), (num_remote_stages + 1) * layout.num_ranks);
}

}  // namespace magi_jax::solver
