#include "xla_ffi/solver/tile_runs.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace magi_jax::solver {
namespace {

using Piece = TilePiece;

// The part of a tight slice in rows [tile_start, tile_end), of which those before `rows_end` exist.
// Every query of a tight slice sees a key, so that clipping to some of them leaves no slack but in
// the keys. Fields are written one by one: copies of whole slices stall on their own stores.
void SetPiece(const BandSlice& s, bool is_full, int32_t id, int64_t tile_start, int64_t tile_end,
              int64_t rows_end, Piece* piece) {
  const int64_t q_start = std::max(s.q_start, tile_start), q_end = std::min(s.q_end, tile_end);
  const int64_t begin = std::max(s.k_start, q_start + s.d_min);
  const int64_t end = std::min(s.k_end, q_end + s.d_max);
  piece->begin = static_cast<int32_t>(begin);
  piece->end = static_cast<int32_t>(end);
  const bool covers = q_start == tile_start && q_end == rows_end;
  piece->full_begin =
      covers ? static_cast<int32_t>(std::max(begin, q_end - 1 + s.d_min)) : piece->begin;
  piece->full_end =
      covers ? static_cast<int32_t>(std::min(end, q_start + s.d_max + 1)) : piece->begin;
  piece->area =
      is_full ? (q_end - q_start) * (s.k_end - s.k_start)
              : CellsUpTo(s, q_start, q_end, s.d_max) - CellsUpTo(s, q_start, q_end, s.d_min - 1);
  piece->id = id;
}

// The longest union of abutting full intervals of pieces [first, last), the later of two as long.
void SetFullInterval(const Piece* first, const Piece* last,
                     std::vector<std::pair<int32_t, int32_t>>* full, TileRun* run) {
  full->clear();
  for (const Piece* piece = first; piece != last; ++piece)
    if (piece->full_begin < piece->full_end) full->push_back({piece->full_begin, piece->full_end});
  if (full->size() > 1) std::sort(full->begin(), full->end());
  run->full_begin = run->full_end = run->begin;
  int32_t best = 0;
  for (size_t i = 0; i < full->size();) {
    const int32_t begin = (*full)[i].first;
    int32_t end = (*full)[i].second;
    for (++i; i < full->size() && (*full)[i].first <= end; ++i)
      end = std::max(end, (*full)[i].second);
    if (end - begin < best) continue;
    best = end - begin;
    run->full_begin = begin;
    run->full_end = end;
  }
}

// Stable. Tiles have few pieces as a rule, and std::stable_sort asks for memory even then.
void SortByBegin(Piece* first, Piece* last) {
  const auto before = [](const Piece& a, const Piece& b) { return a.begin < b.begin; };
  if (last - first > 32) {
    std::stable_sort(first, last, before);
    return;
  }
  for (Piece* i = first; i < last; ++i)
    for (Piece* j = i; j > first && before(*j, j[-1]); --j) std::swap(*j, j[-1]);
}

// Where the runs and ids of a part are written next, and where they begin.
struct PartWalk {
  TileRun *runs, *next_run;
  int32_t *ids, *next_id;

  void AddRun(TileRun run, const Piece* first, const Piece* last) {
    run.ids_begin = static_cast<int32_t>(next_id - ids);
    run.ids_end = static_cast<int32_t>(run.ids_begin + (last - first));
    *next_run++ = run;
    for (const Piece* piece = first; piece != last; ++piece) *next_id++ = piece->id;
  }
};

// Appends the runs of one tile, whose pieces are sorted by begin.
void AppendRuns(const Piece* piece, const Piece* last,
                std::vector<std::pair<int32_t, int32_t>>* full, PartWalk* walk) {
  while (piece != last) {
    const Piece* const first = piece;
    if (piece + 1 == last) {  // most tiles
      const bool any = piece->full_begin < piece->full_end;
      walk->AddRun({piece->begin, piece->end, any ? piece->full_begin : piece->begin,
                    any ? piece->full_end : piece->begin, 0, 0},
                   piece, last);
      return;
    }
    TileRun run = {};
    run.begin = first->begin;
    run.end = piece->end;
    for (++piece; piece != last && piece->begin <= run.end; ++piece)
      run.end = std::max(run.end, piece->end);
    SetFullInterval(first, piece, full, &run);
    walk->AddRun(run, first, piece);
  }
}

// The pieces of all tiles of one part, those of tile t at pieces[ptr[t]:ptr[t + 1]] in the order of
// the slices.
void CutToTiles(const BandSlice* slices, int64_t num_slices, int64_t length, int64_t tile_size,
                std::vector<Piece>* pieces, std::vector<int64_t>* ptr) {
  std::fill(ptr->begin(), ptr->end(), 0);
  const auto first_tile = [&](const BandSlice& s) { return s.q_start / tile_size; };
  const auto last_tile = [&](const BandSlice& s) { return (s.q_end - 1) / tile_size; };
  int64_t* const counts = ptr->data() + 1;
  for (const BandSlice* s = slices; s != slices + num_slices; ++s)
    for (int64_t t = first_tile(*s); t <= last_tile(*s); ++t) ++counts[t];
  std::partial_sum(ptr->begin(), ptr->end(), ptr->begin());
  pieces->resize(ptr->back());
  // Filled from the back, so that ptr[t + 1], the end of tile t, becomes its begin.
  for (int64_t i = num_slices - 1; i >= 0; --i) {
    const bool is_full = slices[i].full();
    for (int64_t t = first_tile(slices[i]); t <= last_tile(slices[i]); ++t) {
      const int64_t start = t * tile_size, end = start + tile_size;
      SetPiece(slices[i], is_full, static_cast<int32_t>(i), start, end, std::min(end, length),
               &(*pieces)[--counts[t]]);
    }
  }
  std::move(ptr->begin() + 1, ptr->end(), ptr->begin());
  ptr->back() = static_cast<int64_t>(pieces->size());
}

// The walk of one part: its entries of ptr [M + 1], and the work of each tile.
void WalkSlices(const BandSlice* slices, int64_t num_slices, int64_t length, int64_t tile_size,
                int32_t* ptr, std::vector<int64_t>* tile_ptr, std::vector<int64_t>* work,
                std::vector<Piece>* pieces, PartWalk* walk) {
  std::vector<std::pair<int32_t, int32_t>> full;
  CutToTiles(slices, num_slices, length, tile_size, pieces, tile_ptr);
  for (size_t t = 0; t < work->size(); ++t) {
    Piece *first = pieces->data() + (*tile_ptr)[t], *last = pieces->data() + (*tile_ptr)[t + 1];
    if (last - first > 1) SortByBegin(first, last);
    (*work)[t] = 0;
    for (const Piece* piece = first; piece != last; ++piece) (*work)[t] += piece->area;
    *ptr++ = static_cast<int32_t>(walk->next_run - walk->runs);
    AppendRuns(first, last, &full, walk);
  }
  *ptr = static_cast<int32_t>(walk->next_run - walk->runs);
}

// The same for a part of one slice, which spares pieces and their order: with long keys and few
// slices, as under a causal mask, most parts are such.
void WalkSlice(const BandSlice& s, int64_t length, int64_t tile_size, int32_t* ptr,
               std::vector<int64_t>* work, PartWalk* walk) {
  const int64_t first = s.q_start / tile_size, last = (s.q_end - 1) / tile_size;
  const bool is_full = s.full();
  std::fill(work->begin(), work->end(), 0);
  for (int64_t t = 0; t <= static_cast<int64_t>(work->size()); ++t)
    ptr[t] = static_cast<int32_t>(std::clamp<int64_t>(t - first, 0, last - first + 1));
  for (int64_t t = first; t <= last; ++t) {
    const int64_t start = t * tile_size, end = start + tile_size;
    Piece piece;
    SetPiece(s, is_full, 0, start, end, std::min(end, length), &piece);
    AppendRuns(&piece, &piece + 1, nullptr, walk);
    (*work)[t] = piece.area;
  }
}

}  // namespace

std::vector<int64_t> CountMeetings(const BandSlice* slices, const std::vector<int64_t>& begin,
                                   int64_t tile_size) {
  std::vector<int64_t> out(begin.size() - 1, 0);
  for (size_t part = 0; part < out.size(); ++part)
    for (int64_t i = begin[part]; i < begin[part + 1]; ++i)
      out[part] += (slices[i].q_end - 1) / tile_size - slices[i].q_start / tile_size + 1;
  return out;
}

void WalkTiles(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t length,
               int64_t tile_size, int64_t num_tiles, TileWalks* walks) {
  std::vector<int64_t> tile_ptr(num_tiles + 1), work(num_tiles);
  walks->num_runs.clear();
  for (size_t part = 0; part + 1 < begin.size(); ++part) {
    TileRun* const runs = walks->runs + part * walks->runs_room;
    int32_t* const ids = walks->ids + part * walks->ids_room;
    int32_t* const ptr = walks->ptr + part * (num_tiles + 1);
    PartWalk walk = {runs, runs, ids, ids};
    const int64_t num_slices = begin[part + 1] - begin[part];
    if (num_slices == 1) {
      WalkSlice(slices[begin[part]], length, tile_size, ptr, &work, &walk);
    } else {
      WalkSlices(slices + begin[part], num_slices, length, tile_size, ptr, &tile_ptr, &work,
                 &walks->pieces, &walk);
    }
    walks->num_runs.push_back(walk.next_run - runs);
    std::fill(walk.next_run, runs + walks->runs_room, TileRun{});
    std::fill(walk.next_id, ids + walks->ids_room, 0);
    int32_t* const order = walks->order + part * num_tiles;
    std::iota(order, order + num_tiles, 0);
    if (!std::is_sorted(work.rbegin(), work.rend()))
      std::stable_sort(order, order + num_tiles,
                       [&](int32_t a, int32_t b) { return work[a] > work[b]; });
  }
}

}  // namespace magi_jax::solver
