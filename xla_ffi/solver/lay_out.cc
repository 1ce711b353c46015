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
  // Calls visit(slice, segment) for each segment that has queries of a slice.
  const auto for_each = [&](const auto& visit) {
    int64_t first = 0;  // neighbours begin in one segment as a rule
    for (const BandSlice* s = slices; s != slices + num_slices; ++s) {
      if (layout.edges[first] > s->q_start || layout.edges[first + 1] <= s->q_start)
        first = SegmentAt(layout, s->q_start);
      for (int64_t g = first; g < layout.num_segments && layout.edges[g] < s->q_end; ++g)
        visit(*s, g);
    }
  };
  std::vector<int64_t> place(layout.num_ranks + 1, 0);
  for_each([&](const BandSlice&, int64_t g) { ++place[layout.owner[g] + 1]; });
  std::partial_sum(place.begin(), place.end(), place.begin());
  QueryCut out;
  out.slices.resize(place.back());
  out.rank.resize(place.back());
  out.q_offset.resize(place.back());
  // Every query of a tight slice sees a key, and so does every part of one.
  for_each([&](const BandSlice& s, int64_t g) {
    const int64_t i = place[layout.owner[g]]++;
    const bool inside = layout.edges[g] <= s.q_start && s.q_end <= layout.edges[g + 1];
    out.slices[i] = inside ? s : ClipQueries(s, layout.edges[g], layout.edges[g + 1]);
    out.rank[i] = layout.owner[g];
    out.q_offset[i] = layout.offset[g];
  });
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
    if (!std::is_sorted(keys.begin(), keys.end())) std::sort(keys.begin(), keys.end());
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

HomeCut CutHome(const QueryCutView& cut, const OwnKeys& own) {
  HomeCut out;
  out.home.reserve(cut.size);
  std::vector<BandSlice> pieces;
  for (int64_t first = 0, last = 0; first < cut.size; first = last) {
    const int64_t rank = cut.rank[first];
    const KeySegment* const begin = own.segments.data() + own.ptr[rank];
    const KeySegment* const end = own.segments.data() + own.ptr[rank + 1];
    const KeySegment* segment = begin;
    pieces.clear();
    for (; last < cut.size && cut.rank[last] == rank; ++last) {
      const BandSlice& slice = cut.slices[last];
      // Neighbours see keys of one segment as a rule.
      if (segment == end || segment->end <= slice.k_start ||
          (segment != begin && segment[-1].end > slice.k_start))
        segment = std::partition_point(begin, end,
                                       [&](const KeySegment& s) { return s.end <= slice.k_start; });
      if (segment != end && segment->begin <= slice.k_start && slice.k_end <= segment->end) {
        pieces.push_back(Shift(slice, cut.q_offset[last], segment->k_offset));
        continue;
      }
      for (const KeySegment* s = segment; s != end && s->begin < slice.k_end; ++s) {
        const BandSlice piece = ClipKeys(slice, s->begin, s->end);
        if (piece.visible()) pieces.push_back(Shift(piece, cut.q_offset[last], s->k_offset));
      }
      out.beyond.slices.push_back(slice);
      out.beyond.rank.push_back(rank);
      out.beyond.q_offset.push_back(cut.q_offset[last]);
    }
    AppendJoined(&pieces, rank, &out.home);
  }
  return out;
}

std::vector<GroupedSlice> CutStages(const HomeCut& cut, const std::vector<RemoteRange>& remote,
                                    int64_t num_ranks, int64_t num_remote_stages) {
  std::vector<GroupedSlice> pieces;
  std::vector<KeySegment> received;
  const QueryCut& beyond = cut.beyond;
  const RemoteRange* range = remote.data();
  const RemoteRange* const ranges_end = range + remote.size();
  for (size_t first = 0, last = 0; first < beyond.slices.size(); first = last) {
    const int64_t rank = beyond.rank[first];
    while (range != ranges_end && range->dst < rank) ++range;
    const RemoteRange* from = range;
    while (range != ranges_end && range->dst == rank) ++range;
    received.clear();
    AppendReceived(from, range, &received);
    for (; last < beyond.slices.size() && beyond.rank[last] == rank; ++last) {
      const BandSlice& slice = beyond.slices[last];
      auto segment =
          std::partition_point(received.begin(), received.end(),
                               [&](const KeySegment& s) { return s.end <= slice.k_start; });
      for (; segment != received.end() && segment->begin < slice.k_end; ++segment) {
        const BandSlice piece = ClipKeys(slice, segment->begin, segment->end);
        if (piece.visible())
          pieces.push_back({Shift(piece, beyond.q_offset[last], segment->k_offset),
                            (segment->stage - 1) * num_ranks + rank});
      }
    }
  }
  return JoinRectangles(pieces, num_remote_stages * num_ranks);
}

}  // namespace magi_jax::solver
