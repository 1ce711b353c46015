#include "xla_ffi/common/table_check.h"

#include <string>
#include <vector>

#include "xla_ffi/common/ffa_operands.h"

namespace magi_jax {
namespace {

std::string Describe(const int32_t* values, int count) {
  std::string text = "(";
  for (int i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
  return text + ")";
}

bool IsInterval(int32_t begin, int32_t end, int32_t low, int32_t high) {
  return low <= begin && begin <= end && end <= high;
}

ffi::Error CheckRun(const std::string& name, const TileRuns& table, int32_t index, int32_t tile,
                    int32_t walked, int32_t num_slices, int32_t walk_len) {
  const Run& run = table.runs[index];
  const std::string place = name + ".runs[" + std::to_string(index) + "] of tile " +
                            std::to_string(tile) + " is " + Describe(&run.begin, 6);
  if (!IsInterval(run.begin, run.end, walked, walk_len)) {
    return InvalidArgument(place + ", but must lie in [" + std::to_string(walked) + ", " +
                           std::to_string(walk_len) + ")");
  }
  if (!IsInterval(run.full_begin, run.full_end, run.begin, run.end)) {
    return InvalidArgument(place + ", whose full interval is outside of it");
  }
  if (!IsInterval(run.ids_begin, run.ids_end, 0, table.num_ids)) {
    return InvalidArgument(place + ", but there are " + std::to_string(table.num_ids) + " ids");
  }
  for (int32_t i = run.ids_begin; i < run.ids_end; ++i) {
    if (table.ids[i] < 0 || table.ids[i] >= num_slices) {
      return InvalidArgument(name + ".ids[" + std::to_string(i) + "] is " +
                             std::to_string(table.ids[i]) + ", but there are " +
                             std::to_string(num_slices) + " slices");
    }
  }
  return ffi::Error::Success();
}

ffi::Error CheckOrder(const std::string& name, const TileRuns& table) {
  std::vector<bool> seen(table.num_tiles);
  for (int32_t i = 0; i < table.num_tiles; ++i) {
    const int32_t tile = table.order[i];
    if (tile < 0 || tile >= table.num_tiles || seen[tile]) {
      return InvalidArgument(name + ".order[" + std::to_string(i) + "] is " + std::to_string(tile) +
                             ", but order must list each of " + std::to_string(table.num_tiles) +
                             " tiles once");
    }
    seen[tile] = true;
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error CheckSliceValues(const Slice* slices, const Problem& problem) {
  const int32_t q_len = problem.q_len, k_len = problem.k_len;
  for (int32_t i = 0; i < problem.num_slices; ++i) {
    const Slice& s = slices[i];
    const bool inside = IsInterval(s.q_start, s.q_end, 0, q_len) &&
                        IsInterval(s.k_start, s.k_end, 0, k_len) && s.d_min >= -q_len &&
                        s.d_min <= s.d_max && s.d_max <= k_len;
    if (!inside) {
      return InvalidArgument("slices[" + std::to_string(i) + "] is " + Describe(&s.q_start, 6) +
                             ", which is no tight slice of " + std::to_string(q_len) +
                             " queries and " + std::to_string(k_len) + " keys");
    }
  }
  return ffi::Error::Success();
}

ffi::Error CheckTileRunValues(const char* name, const TileRuns& table, int32_t num_slices,
                              int32_t walk_len) {
  if (table.ptr[0] != 0 || table.ptr[table.num_tiles] > table.num_runs) {
    return InvalidArgument(std::string(name) + ".ptr goes from " + std::to_string(table.ptr[0]) +
                           " to " + std::to_string(table.ptr[table.num_tiles]) +
                           ", but there are " + std::to_string(table.num_runs) + " runs");
  }
  for (int32_t tile = 0; tile < table.num_tiles; ++tile) {
    const int32_t begin = table.ptr[tile], end = table.ptr[tile + 1];
    if (!IsInterval(begin, end, 0, table.num_runs)) {
      return InvalidArgument(std::string(name) + ".ptr falls from " + std::to_string(begin) +
                             " to " + std::to_string(end) + " at tile " + std::to_string(tile));
    }
    int32_t walked = 0;
    for (int32_t r = begin; r < end; ++r) {
      MAGI_JAX_RETURN_IF_ERROR(CheckRun(name, table, r, tile, walked, num_slices, walk_len));
      walked = table.runs[r].end;
    }
  }
  return CheckOrder(name, table);
}

}  // namespace magi_jax
