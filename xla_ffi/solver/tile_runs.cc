#include "xla_ffi/solver/tile_runs.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "xla_ffi/solver/tile_sweep.h"

namespace magi_jax::solver {
namespace {

// What one slice shows to the rows of one tile.
struct Piece {
  int32_t begin, end;  // visible keys
  // Keys that all rows of the tile see; empty when full_begin >= full_end.
  int32_t full_begin, full_end;
  int64_t area;
  int32_t id;
};

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
    if (!std::is_sorted(first, last, before)) std::stable_sort(first, last, before);
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

// Writes the walk of one part, stretch by stretch.
class PartWriter {
 public:
  PartWriter(const BandSlice* slices, int64_t length, int64_t tile_size, int32_t* ptr,
             PartWalk* walk)
      : slices_(slices), length_(length), tile_size_(tile_size), ptr_(ptr), walk_(walk) {}

  // Tiles [begin, end), all of which slices `ids` meet.
  void Write(int64_t begin, int64_t end, const std::vector<int32_t>& ids) {
    const bool alike = end - begin > 3 && std::all_of(ids.begin(), ids.end(), [&](int32_t id) {
                         return slices_[id].full();
                       });
    for (int64_t tile = begin; tile < end; ++tile) {
      WriteTile(tile, ids);
      // Rectangles fill all tiles but the first and the last of a stretch, which so are alike.
      if (alike && tile == begin + 1) {
        Repeat(tile, end - 1);
        tile = end - 2;
      }
    }
  }

  // Tiles by decreasing work, those of equal work in their order.
  void WriteOrder(int32_t* order) {
    const auto more = [](const WorkStretch& a, const WorkStretch& b) { return a.work > b.work; };
    if (!std::is_sorted(work_.begin(), work_.end(), more))
      std::stable_sort(work_.begin(), work_.end(), more);
    for (const WorkStretch& stretch : work_) {
      std::iota(order, order + stretch.count, stretch.first);
      order += stretch.count;
    }
  }

  int32_t num_runs() const { return static_cast<int32_t>(walk_->next_run - walk_->runs); }

 private:
  // Neighbouring tiles of equal work.
  struct WorkStretch {
    int64_t work;
    int32_t first, count;
  };

  void AddWork(int64_t work, int64_t first, int64_t count) {
    if (!work_.empty() && work_.back().work == work) {
      work_.back().count += static_cast<int32_t>(count);
    } else {
      work_.push_back({work, static_cast<int32_t>(first), static_cast<int32_t>(count)});
    }
  }

  void WriteTile(int64_t tile, const std::vector<int32_t>& ids) {
    const int64_t start = tile * tile_size_, end = start + tile_size_;
    const int64_t rows_end = std::min(end, length_);
    pieces_.resize(ids.size());
    int64_t work = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      const BandSlice& slice = slices_[ids[i]];
      SetPiece(slice, slice.full(), ids[i], start, end, rows_end, &pieces_[i]);
      work += pieces_[i].area;
    }
    Piece *const first = pieces_.data(), *const last = first + pieces_.size();
    if (last - first > 1) SortByBegin(first, last);
    ptr_[tile] = num_runs();
    AppendRuns(first, last, &full_, walk_);
    AddWork(work, tile, 1);
  }

  // Tiles up to `end` get what `tile`, the last that was written, has.
  void Repeat(int64_t tile, int64_t end) {
    const TileRun* const run = walk_->runs + ptr_[tile];
    const auto runs = static_cast<int32_t>(walk_->next_run - run);
    const int32_t ids = runs == 0 ? 0 : run[runs - 1].ids_end - run[0].ids_begin;
    const int32_t* const id = walk_->next_id - ids;
    const auto count = static_cast<int32_t>(end - tile - 1);
    // Loops over one array each, which is what compilers make fast.
    for (int32_t t = 0; t < count; ++t) ptr_[tile + 1 + t] = ptr_[tile] + runs * (t + 1);
    for (int32_t i = 0; i < runs; ++i) {
      const TileRun first = run[i];
      TileRun* to = walk_->next_run + i;
      for (int32_t t = 1; t <= count; ++t, to += runs)
        *to = {first.begin,
               first.end,
               first.full_begin,
               first.full_end,
               first.ids_begin + t * ids,
               first.ids_end + t * ids};
    }
    for (int32_t i = 0; i < ids; ++i) {
      int32_t* to = walk_->next_id + i;
      for (int32_t t = 0; t < count; ++t, to += ids) *to = id[i];
    }
    walk_->next_run += count * runs;
    walk_->next_id += count * ids;
    work_.back().count += count;
  }

  const BandSlice* slices_;
  int64_t length_, tile_size_;
  int32_t* ptr_;
  PartWalk* walk_;
  std::vector<Piece> pieces_;
  std::vector<std::pair<int32_t, int32_t>> full_;
  std::vector<WorkStretch> work_;
};

// Runs of a tile that these slices meet, which all show the same keys to each tile they meet.
int64_t CountUnions(const BandSlice* slices, const std::vector<int32_t>& ids,
                    std::vector<std::pair<int64_t, int64_t>>* keys) {
  keys->clear();
  for (int32_t id : ids) keys->push_back({slices[id].k_start, slices[id].k_end});
  if (!std::is_sorted(keys->begin(), keys->end())) std::sort(keys->begin(), keys->end());
  int64_t count = 0, end = -1;
  for (const auto& [k_start, k_end] : *keys) {
    count += k_start > end;
    end = std::max(end, k_end);
  }
  return count;
}

}  // namespace

Rooms CountEntries(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t tile_size,
                   int64_t num_tiles) {
  Rooms most = {0, 0};
  Sweep sweep(tile_size, num_tiles);
  std::vector<std::pair<int64_t, int64_t>> keys;
  for (size_t part = 0; part + 1 < begin.size(); ++part) {
    const BandSlice* const own = slices + begin[part];
    Rooms rooms = {0, 0};
    const auto shows_same_keys = [&](int32_t id) {
      return own[id].full() || own[id].q_start / tile_size == (own[id].q_end - 1) / tile_size;
    };
    sweep.Run(own, begin[part + 1] - begin[part],
              [&](int64_t first, int64_t end, const std::vector<int32_t>& ids) {
                const auto met = static_cast<int64_t>(ids.size());
                const bool same = met > 1 && std::all_of(ids.begin(), ids.end(), shows_same_keys);
                rooms.ids += met * (end - first);
                rooms.runs += (same ? CountUnions(own, ids, &keys) : met) * (end - first);
              });
    most = {std::max(most.runs, rooms.runs), std::max(most.ids, rooms.ids)};
  }
  return most;
}

void WalkTiles(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t length,
               int64_t tile_size, int64_t num_tiles, TileWalks* walks) {
  Sweep sweep(tile_size, num_tiles);
  walks->num_runs.clear();
  for (size_t part = 0; part + 1 < begin.size(); ++part) {
    TileRun* const runs = walks->runs + part * walks->room.runs;
    int32_t* const ids = walks->ids + part * walks->room.ids;
    int32_t* const ptr = walks->ptr + part * (num_tiles + 1);
    PartWalk walk = {runs, runs, ids, ids};
    PartWriter writer(slices + begin[part], length, tile_size, ptr, &walk);
    sweep.Run(slices + begin[part], begin[part + 1] - begin[part],
              [&](int64_t first, int64_t end, const std::vector<int32_t>& met) {
                writer.Write(first, end, met);
              });
    ptr[num_tiles] = writer.num_runs();
    walks->num_runs.push_back(writer.num_runs());
    std::fill(walk.next_run, runs + walks->room.runs, TileRun{});
    std::fill(walk.next_id, ids + walks->room.ids, 0);
    writer.WriteOrder(walks->order + part * num_tiles);
  }
}

}  // namespace magi_jax::solver
