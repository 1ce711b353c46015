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

// Appends the runs of one tile, whose pieces are sorted by begin; ids are counted from `id_base`.
void AppendRuns(const Piece* piece, const Piece* last, size_t id_base,
                std::vector<std::pair<int32_t, int32_t>>* full, TileWalks* walks) {
  while (piece != last) {
    const Piece* const first = piece;
    if (piece + 1 == last) {  // most tiles
      const bool any = piece->full_begin < piece->full_end;
      const auto id = static_cast<int32_t>(walks->ids.size() - id_base);
      walks->runs.push_back({piece->begin, piece->end, any ? piece->full_begin : piece->begin,
                             any ? piece->full_end : piece->begin, id, id + 1});
      walks->ids.push_back(piece->id);
      return;
    }
    int32_t end = piece->end;
    for (++piece; piece != last && piece->begin <= end; ++piece) end = std::max(end, piece->end);
    TileRun run = {};
    run.begin = first->begin;
    run.end = end;
    run.ids_begin = static_cast<int32_t>(walks->ids.size() - id_base);
    run.ids_end = static_cast<int32_t>(run.ids_begin + (piece - first));
    SetFullInterval(first, piece, full, &run);
    for (const Piece* p = first; p != piece; ++p) walks->ids.push_back(p->id);
    walks->runs.push_back(run);
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

}  // namespace

void WalkTiles(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t length,
               int64_t tile_size, int64_t num_tiles, int32_t* ptr, int32_t* order,
               TileWalks* walks) {
  const size_t num_parts = begin.size() - 1;
  std::vector<int64_t> tile_ptr(num_tiles + 1), work(num_tiles);
  std::vector<std::pair<int32_t, int32_t>> full;
  int64_t num_pieces = 0;
  for (int64_t i = begin.front(); i < begin.back(); ++i)
    num_pieces += (slices[i].q_end - 1) / tile_size - slices[i].q_start / tile_size + 1;
  walks->runs.clear(), walks->ids.clear(), walks->runs_before.clear(), walks->ids_before.clear();
  walks->runs.reserve(num_pieces), walks->ids.reserve(num_pieces);
  for (size_t part = 0; part < num_parts; ++part, order += num_tiles) {
    CutToTiles(slices + begin[part], begin[part + 1] - begin[part], length, tile_size,
               &walks->pieces, &tile_ptr);
    walks->runs_before.push_back(walks->runs.size());
    walks->ids_before.push_back(walks->ids.size());
    for (int64_t t = 0; t < num_tiles; ++t) {
      Piece* first = walks->pieces.data() + tile_ptr[t];
      Piece* last = walks->pieces.data() + tile_ptr[t + 1];
      if (last - first > 1) SortByBegin(first, last);
      work[t] = 0;
      for (const Piece* piece = first; piece != last; ++piece) work[t] += piece->area;
      *ptr++ = static_cast<int32_t>(walks->runs.size() - walks->runs_before.back());
      AppendRuns(first, last, walks->ids_before.back(), &full, walks);
    }
    *ptr++ = static_cast<int32_t>(walks->runs.size() - walks->runs_before.back());
    std::iota(order, order + num_tiles, 0);
    if (!std::is_sorted(work.rbegin(), work.rend()))
      std::stable_sort(order, order + num_tiles,
                       [&](int32_t a, int32_t b) { return work[a] > work[b]; });
  }
  walks->runs_before.push_back(walks->runs.size());
  walks->ids_before.push_back(walks->ids.size());
}

}  // namespace magi_jax::solver
