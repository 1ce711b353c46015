#include "xla_ffi/solver/bind_tables.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "xla_ffi/solver/arrays.h"
#include "xla_ffi/solver/join.h"
#include "xla_ffi/solver/tile_runs.h"
#include "xla_ffi/solver/transfer.h"

namespace magi_jax::solver {
namespace {

// Rows of each part, padded with zeros to what `round` makes of the longest: [P, L, width].
py::array_t<int32_t> Pad(const int64_t* rows, const std::vector<int64_t>& before, int64_t width,
                         const py::object& round) {
  const int64_t num_parts = static_cast<int64_t>(before.size()) - 1;
  int64_t most = 0;
  for (int64_t p = 0; p < num_parts; ++p) most = std::max(most, before[p + 1] - before[p]);
  const int64_t size = std::max(most, round.is_none() ? 0 : round(most).cast<int64_t>());
  py::array_t<int32_t> out({num_parts, size, width});
  int32_t* to = out.mutable_data();
  for (int64_t p = 0; p < num_parts; ++p, to += size * width) {
    const int64_t filled = (before[p + 1] - before[p]) * width;
    std::copy(rows + before[p] * width, rows + before[p + 1] * width, to);
    std::fill(to + filled, to + size * width, 0);
  }
  return out;
}

// Slices of rising parts: those of part p at slices[begin[p]:begin[p + 1]].
std::vector<int64_t> PartsOf(const Ints& slices, const Ints& part, int64_t num_parts) {
  Require(slices.size() == 6 * part.size() && num_parts >= 0,
          "slices [A, 6] and part [A] do not fit together");
  std::vector<int64_t> begin(num_parts + 1, 0);
  int64_t last = 0;
  for (py::ssize_t i = 0; i < part.size(); ++i) {
    const int64_t p = part.data()[i];
    Require(p >= last && p < num_parts, "part must rise within range");
    last = p;
    ++begin[p + 1];
  }
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  return begin;
}

// (ptr [P, M + 1], runs [P, R, 6], ids [P, I, 1], order [P, M]); round_runs and round_ids say how
// much room to leave for so many, or are None.
py::tuple Walk(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t length,
               int64_t tile_size, const py::object& round_runs, const py::object& round_ids,
               TileWalks* walks) {
  static_assert(sizeof(BandSlice) == 6 * sizeof(int64_t) && sizeof(TileRun) == 6 * sizeof(int32_t));
  Require(tile_size >= 1, "a tile has at least one row");
  for (int64_t i = 0; i < begin.back(); ++i)
    Require(
        slices[i].q_start >= 0 && slices[i].q_start < slices[i].q_end && slices[i].q_end <= length,
        "a slice is empty or out of range");
  const auto num_parts = static_cast<int64_t>(begin.size()) - 1;
  const int64_t num_tiles = std::max<int64_t>((length + tile_size - 1) / tile_size, 1);
  const auto rounded = [](int64_t most, const py::object& round) {
    return std::max(most, round.is_none() ? 0 : round(most).cast<int64_t>());
  };
  const auto most_of = [](const std::vector<int64_t>& counts) {
    return counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
  };
  const Rooms most = CountEntries(slices, begin, tile_size, num_tiles);
  const int64_t runs_room = rounded(most.runs, round_runs), ids_room = rounded(most.ids, round_ids);
  py::array_t<int32_t> ptr({num_parts, num_tiles + 1}), order({num_parts, num_tiles});
  py::array_t<int32_t> runs({num_parts, runs_room, int64_t{6}}),
      ids({num_parts, ids_room, int64_t{1}});
  walks->ptr = ptr.mutable_data();
  walks->runs = reinterpret_cast<TileRun*>(runs.mutable_data());
  walks->ids = ids.mutable_data();
  walks->order = order.mutable_data();
  walks->room = {runs_room, ids_room};
  WalkTiles(slices, begin, length, tile_size, num_tiles, walks);
  // Slices of a tile whose keys abut have one run together, so that less room may do. Runs move up
  // where they are: memory that is touched for the first time costs more than they do.
  const int64_t needed = rounded(most_of(walks->num_runs), round_runs);
  if (needed < runs_room) {
    for (int64_t p = 1; p < num_parts; ++p)
      std::copy_n(walks->runs + p * runs_room, needed, walks->runs + p * needed);
    runs.resize({num_parts, needed, int64_t{6}}, false);
  }
  return py::make_tuple(ptr, runs, ids, order);
}

// The walk of tiles of slices [A, 6] of rising parts [A].
py::tuple RunWalkTiles(const Ints& slices, const Ints& part, int64_t num_parts, int64_t length,
                       int64_t tile_size, const py::object& round_runs,
                       const py::object& round_ids) {
  TileWalks walks;
  return Walk(RowsOf<BandSlice>(slices), PartsOf(slices, part, num_parts), length, tile_size,
              round_runs, round_ids, &walks);
}

// A whole slice table: (slices [P, A, 6], walk of query tiles, walk of key tiles). `rooms` are how
// much room to leave for so many slices, runs and ids of queries, and runs and ids of keys.
py::tuple RunSliceTable(const Ints& slices, const Ints& part, int64_t num_parts, int64_t q_len,
                        int64_t k_len, int64_t tile_size, const py::tuple& rooms) {
  Require(rooms.size() == 5, "five sizes are to be rounded");
  const std::vector<int64_t> begin = PartsOf(slices, part, num_parts);
  const auto* rows = RowsOf<BandSlice>(slices);
  std::vector<BandSlice> transposed(rows, rows + part.size());
  for (BandSlice& s : transposed) s = {s.k_start, s.k_end, s.q_start, s.q_end, -s.d_max, -s.d_min};
  TileWalks walks;
  const py::tuple by_query = Walk(rows, begin, q_len, tile_size, rooms[1], rooms[2], &walks);
  const py::tuple by_key =
      Walk(transposed.data(), begin, k_len, tile_size, rooms[3], rooms[4], &walks);
  return py::make_tuple(Pad(slices.data(), begin, 6, rooms[0]), by_query, by_key);
}

// Tight slices [A, 6] with neighbours of one diagonal joined; the same array where there are none.
Ints RunJoinDiagonals(const Ints& slices) {
  const auto* rows = RowsOf<BandSlice>(slices);
  const int64_t count = slices.size() / 6, left = JoinDiagonals(rows, count, nullptr);
  if (left == count) return slices;
  Ints out({left, int64_t{6}});
  JoinDiagonals(rows, count, reinterpret_cast<BandSlice*>(out.mutable_data()));
  return out;
}

// Visible cells [A] of tight slices [A, 6].
Ints RunAreas(const Ints& slices) {
  const auto* rows = RowsOf<BandSlice>(slices);
  Ints out(slices.size() / 6);
  for (py::ssize_t i = 0; i < out.size(); ++i) out.mutable_data()[i] = Area(rows[i]);
  return out;
}

// Rows [N, W] of rising parts [N], padded to `size` rows or the longest part with `fill` [W]:
// int32 [P, L, W].
py::array_t<int32_t> RunSplitByPart(const Ints& rows, const Ints& part, int64_t num_parts,
                                    int64_t size, const Ints& fill) {
  const int64_t width = fill.size(), num_rows = part.size();
  Require(rows.size() == num_rows * width && num_parts >= 0, "rows, parts and fill do not fit");
  std::vector<int64_t> count(num_parts, 0);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t p = part.data()[i];
    Require(p >= (i > 0 ? part.data()[i - 1] : 0) && p < num_parts, "part must rise within range");
    size = std::max(size, ++count[p]);
  }
  py::array_t<int32_t> out({num_parts, size, width});
  int32_t* to = out.mutable_data();
  const int64_t* from = rows.data();
  for (int64_t p = 0; p < num_parts; ++p) {
    to = std::copy(from, from + count[p] * width, to);
    from += count[p] * width;
    for (int64_t i = count[p]; i < size; ++i) to = std::copy(fill.data(), fill.data() + width, to);
  }
  return out;
}

// Writes table[rank, at + i] = first + i for i < count, for each of the ranges [E].
void RunWriteRanges(py::array_t<int32_t, py::array::c_style>& table, const Ints& rank,
                    const Ints& at, const Ints& count, const Ints& first) {
  Require(table.ndim() == 2 && at.size() == rank.size() && count.size() == rank.size() &&
              first.size() == rank.size(),
          "a table [R, L] and columns of one length are needed");
  const int64_t length = table.shape(1);
  int32_t* const rows = table.mutable_data();
  for (py::ssize_t i = 0; i < rank.size(); ++i) {
    const int64_t begin = at.data()[i], size = count.data()[i];
    Require(rank.data()[i] >= 0 && rank.data()[i] < table.shape(0) && begin >= 0 && size >= 0 &&
                begin + size <= length,
            "a range lies outside of the table");
    int32_t* const to = rows + rank.data()[i] * length + begin;
    std::iota(to, to + size, static_cast<int32_t>(first.data()[i]));
  }
}

// (slices [B, 6], rank [B], q_offset [B], remote [E, 7]): see lay_out.h. Two layouts, of the
// queries and of the keys.
py::tuple RunFindRemote(const Ints& slices, const Ints& edges, const Ints& owner,
                        const Ints& offset, const Ints& key_edges, const Ints& key_owner,
                        const Ints& key_offset, int64_t num_ranks) {
  static_assert(sizeof(RemoteRange) == 7 * sizeof(int64_t));
  const Layout layout = LayoutOf(edges, owner, offset, num_ranks);
  const Layout keys = LayoutOf(key_edges, key_owner, key_offset, num_ranks);
  const QueryCut cut = CutQueries(RowsOf<BandSlice>(slices), slices.size() / 6, layout);
  return py::make_tuple(Table(cut.slices), Column(cut.rank), Column(cut.q_offset),
                        Table(FindRemote(cut, keys)));
}

Pieces PiecesOf(const Ints& src, const Ints& dst, const Ints& src_row, const Ints& dst_row,
                const Ints& n_rows, int64_t num_ranks) {
  const py::ssize_t size = src.size();
  Require(dst.size() == size && src_row.size() == size && dst_row.size() == size &&
              n_rows.size() == size,
          "columns of pieces differ in length");
  for (py::ssize_t i = 0; i < size; ++i)
    Require(src.data()[i] >= 0 && src.data()[i] < num_ranks && dst.data()[i] >= 0 &&
                dst.data()[i] < num_ranks,
            "a rank is out of range");
  return {src.data(), dst.data(), src_row.data(), dst_row.data(), n_rows.data(), size};
}

// (across, within), five columns each: see transfer.h.
py::tuple RunSplitSteps(const Ints& src, const Ints& dst, const Ints& src_row, const Ints& dst_row,
                        const Ints& n_rows, int64_t num_ranks, int64_t ranks_per_node) {
  Require(ranks_per_node >= 1, "a node has at least one rank");
  const Pieces pieces = PiecesOf(src, dst, src_row, dst_row, n_rows, num_ranks);
  const TwoSteps steps = SplitSteps(pieces, ranks_per_node);
  const auto columns = [](const StepPieces& p) {
    return py::make_tuple(Column(p.src), Column(p.dst), Column(p.src_row), Column(p.dst_row),
                          Column(p.n_rows));
  };
  return py::make_tuple(columns(steps.across), columns(steps.within));
}

// (send [E, 5], send_rank [E], recv [E, 5], recv_rank [E], pair_rows, self_rows, dst_rows).
py::tuple RunSortPieces(const Ints& src, const Ints& dst, const Ints& src_row, const Ints& dst_row,
                        const Ints& n_rows, int64_t num_ranks) {
  static_assert(sizeof(MovedPiece) == 5 * sizeof(int64_t));
  const TransferTables tables =
      SortPieces(PiecesOf(src, dst, src_row, dst_row, n_rows, num_ranks), num_ranks);
  return py::make_tuple(Table(tables.send), Column(tables.send_rank), Table(tables.recv),
                        Column(tables.recv_rank), tables.pair_rows, tables.self_rows,
                        tables.dst_rows);
}

}  // namespace

void BindTables(py::module_& m) {
  m.def("walk_tiles", &RunWalkTiles);
  m.def("slice_table", &RunSliceTable);
  m.def("join_diagonals", &RunJoinDiagonals);
  m.def("areas", &RunAreas);
  m.def("split_by_part", &RunSplitByPart);
  m.def("write_ranges", &RunWriteRanges, py::arg("table").noconvert(), py::arg("rank"),
        py::arg("at"), py::arg("count"), py::arg("first"));
  m.def("find_remote", &RunFindRemote);
  m.def("sort_pieces", &RunSortPieces);
  m.def("split_steps", &RunSplitSteps);
}

}  // namespace magi_jax::solver
