#include "xla_ffi/solver/tile_runs.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace magi_jax::solver {
namespace {

// What one slice shows to the rows of one tile.
struct Piece {
  int64_t begin, end;  // visible keys
  int64_t full_begin,
      full_end;  // keys that all rows of the tile see; empty when full_begin >= full_end
  int64_t area;
  int32_t id;
};

// Sum of clip(j, 0, width) over all integers j <= x.
int64_t RampSum(int64_t x, int64_t width) {
  const int64_t rising = std::max<int64_t>(x, 0), beyond = std::max<int64_t>(x - width, 0);
  return rising * (rising + 1) / 2 - beyond * (beyond + 1) / 2;
}

int64_t Area(const BandSlice& s) {
  const int64_t width = s.k_end - s.k_start;
  const auto cells_up_to = [&](int64_t d) {
    return RampSum(s.q_end + d - s.k_start, width) - RampSum(s.q_start + d - s.k_start, width);
  };
  return cells_up_to(s.d_max) - cells_up_to(s.d_min - 1);
}

// The part of a tight slice in rows [q_start, q_end), which it meets, tight again.
BandSlice ClipQueries(BandSlice s, int64_t q_start, int64_t q_end) {
  s.q_start = std::max(s.q_start, q_start);
  s.q_end = std::min(s.q_end, q_end);
  s.d_min = std::max(s.d_min, s.k_start - (s.q_end - 1));
  s.d_max = std::min(s.d_max, s.k_end - 1 - s.q_start);
  s.k_start = std::max(s.k_start, s.q_start + s.d_min);
  s.k_end = std::min(s.k_end, s.q_end + s.d_max);
  return s;
}

Piece PieceOf(const BandSlice& slice, int32_t id, int64_t tile_start, int64_t tile_end,
              int64_t rows_end) {
  const BandSlice cut = ClipQueries(slice, tile_start, tile_end);
  Piece piece = {cut.k_start, cut.k_end, 0, 0, Area(cut), id};
  if (cut.q_start == tile_start && cut.q_end == rows_end) {
    piece.full_begin = std::max(cut.k_start, rows_end - 1 + cut.d_min);
    piece.full_end = std::min(cut.k_end, tile_start + cut.d_max + 1);
  }
  return piece;
}

// The longest union of abutting full intervals of pieces [first, last), the later of two as long.
void SetFullInterval(const std::vector<Piece>& pieces, size_t first, size_t last,
                     std::vector<std::pair<int64_t, int64_t>>* full, TileRun* run) {
  full->clear();
  for (size_t i = first; i < last; ++i)
    if (pieces[i].full_begin < pieces[i].full_end)
      full->push_back({pieces[i].full_begin, pieces[i].full_end});
  std::sort(full->begin(), full->end());
  run->full_begin = run->full_end = run->begin;
  int64_t best = 0;
  for (size_t i = 0; i < full->size();) {
    const int64_t begin = (*full)[i].first;
    int64_t end = (*full)[i].second;
    for (++i; i < full->size() && (*full)[i].first <= end; ++i)
      end = std::max(end, (*full)[i].second);
    if (end - begin < best) continue;
    best = end - begin;
    run->full_begin = static_cast<int32_t>(begin);
    run->full_end = static_cast<int32_t>(end);
  }
}

// Stable. Tiles have few pieces as a rule, and std::stable_sort asks for memory even then.
void SortByBegin(std::vector<Piece>* pieces) {
  const auto before = [](const Piece& a, const Piece& b) { return a.begin < b.begin; };
  if (pieces->size() > 32) {
    std::stable_sort(pieces->begin(), pieces->end(), before);
    return;
  }
  for (size_t i = 1; i < pieces->size(); ++i)
    for (size_t j = i; j > 0 && before((*pieces)[j], (*pieces)[j - 1]); --j)
      std::swap((*pieces)[j], (*pieces)[j - 1]);
}

// Appends the runs of one tile, whose pieces are sorted by begin; ids are counted from `id_base`.
void AppendRuns(const std::vector<Piece>& pieces, size_t id_base,
                std::vector<std::pair<int64_t, int64_t>>* full, TileWalks* walks) {
  for (size_t first = 0; first < pieces.size();) {
    int64_t end = pieces[first].end;
    size_t last = first + 1;
    for (; last < pieces.size() && pieces[last].begin <= end; ++last)
      end = std::max(end, pieces[last].end);
    TileRun run = {};
    run.begin = static_cast<int32_t>(pieces[first].begin);
    run.end = static_cast<int32_t>(end);
    run.ids_begin = static_cast<int32_t>(walks->ids.size() - id_base);
    run.ids_end = static_cast<int32_t>(run.ids_begin + (last - first));
    SetFullInterval(pieces, first, last, full, &run);
    for (size_t i = first; i < last; ++i) walks->ids.push_back(pieces[i].id);
    walks->runs.push_back(run);
    first = last;
  }
}

}  // namespace

TileWalks WalkTiles(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t length,
                    int64_t tile_size) {
  const size_t num_parts = begin.size() - 1;
  TileWalks walks;
  walks.num_tiles = std::max<int64_t>((length + tile_size - 1) / tile_size, 1);
  std::vector<std::vector<Piece>> tiles(walks.num_tiles);
  std::vector<int64_t> work(walks.num_tiles);
  std::vector<std::pair<int64_t, int64_t>> full;
  for (size_t part = 0; part < num_parts; ++part) {
    for (std::vector<Piece>& pieces : tiles) pieces.clear();
    for (int64_t i = begin[part]; i < begin[part + 1]; ++i) {
      for (int64_t t = slices[i].q_start / tile_size; t <= (slices[i].q_end - 1) / tile_size; ++t) {
        const int64_t start = t * tile_size, end = start + tile_size;
        tiles[t].push_back(PieceOf(slices[i], static_cast<int32_t>(i - begin[part]), start, end,
                                   std::min(end, length)));
      }
    }
    walks.runs_before.push_back(walks.runs.size());
    walks.ids_before.push_back(walks.ids.size());
    for (int64_t t = 0; t < walks.num_tiles; ++t) {
      std::vector<Piece>& pieces = tiles[t];
      SortByBegin(&pieces);
      work[t] = 0;
      for (const Piece& piece : pieces) work[t] += piece.area;
      walks.ptr.push_back(static_cast<int32_t>(walks.runs.size() - walks.runs_before.back()));
      AppendRuns(pieces, walks.ids_before.back(), &full, &walks);
    }
    walks.ptr.push_back(static_cast<int32_t>(walks.runs.size() - walks.runs_before.back()));
    const size_t at = walks.order.size();
    walks.order.resize(at + walks.num_tiles);
    std::iota(walks.order.begin() + at, walks.order.end(), 0);
    std::stable_sort(walks.order.begin() + at, walks.order.end(),
                     [&](int32_t a, int32_t b) { return work[a] > work[b]; });
  }
  walks.runs_before.push_back(walks.runs.size());
  walks.ids_before.push_back(walks.ids.size());
  return walks;
}

}  // namespace magi_jax::solver
