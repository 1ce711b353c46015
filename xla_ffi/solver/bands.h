// Band slices in C++: what magi_jax/masks/bands.py does to one row.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_BANDS_H_
#define MAGI_JAX_XLA_FFI_SOLVER_BANDS_H_

#include <algorithm>
#include <cstdint>

namespace magi_jax::solver {

// Query q sees key k when both are in range and d_min <= k - q <= d_max.
struct BandSlice {
  int64_t q_start, q_end, k_start, k_end, d_min, d_max;

  bool visible() const { return q_start < q_end; }
  // Whether every query sees every key of the rectangle; of a tight slice.
  bool full() const { return d_min == k_start - q_end + 1 && d_max == k_end - 1 - q_start; }
};

// Sum of clip(j, 0, width) over all integers j <= x.
inline int64_t RampSum(int64_t x, int64_t width) {
  const int64_t rising = std::max<int64_t>(x, 0), beyond = std::max<int64_t>(x - width, 0);
  return rising * (rising + 1) / 2 - beyond * (beyond + 1) / 2;
}

// Cells with k - q <= d of queries [q_start, q_end) and the keys of a slice.
inline int64_t CellsUpTo(const BandSlice& s, int64_t q_start, int64_t q_end, int64_t d) {
  const int64_t width = s.k_end - s.k_start;
  return RampSum(q_end + d - s.k_start, width) - RampSum(q_start + d - s.k_start, width);
}

// Visible cells of a tight slice.
inline int64_t Area(const BandSlice& s) {
  if (s.full()) return (s.q_end - s.q_start) * (s.k_end - s.k_start);
  return CellsUpTo(s, s.q_start, s.q_end, s.d_max) - CellsUpTo(s, s.q_start, s.q_end, s.d_min - 1);
}

// The slice without slack; one without a visible cell becomes all zeros.
inline BandSlice Tight(BandSlice s) {
  s.d_min = std::max(s.d_min, s.k_start - (s.q_end - 1));
  s.d_max = std::min(s.d_max, (s.k_end - 1) - s.q_start);
  const BandSlice t = {std::max(s.q_start, s.k_start - s.d_max),
                       std::min(s.q_end, s.k_end - s.d_min),
                       std::max(s.k_start, s.q_start + s.d_min),
                       std::min(s.k_end, s.q_end + s.d_max),
                       s.d_min,
                       s.d_max};
  const bool visible = s.q_start < s.q_end && s.k_start < s.k_end && s.d_min <= s.d_max &&
                       t.q_start < t.q_end && t.k_start < t.k_end;
  return visible ? t : BandSlice{};
}

// The part of a slice inside queries [q_start, q_end) or keys [k_start, k_end), tight.
inline BandSlice ClipQueries(BandSlice s, int64_t q_start, int64_t q_end) {
  s.q_start = std::max(s.q_start, q_start);
  s.q_end = std::min(s.q_end, q_end);
  return Tight(s);
}
inline BandSlice ClipKeys(BandSlice s, int64_t k_start, int64_t k_end) {
  s.k_start = std::max(s.k_start, k_start);
  s.k_end = std::min(s.k_end, k_end);
  return Tight(s);
}

// Queries moved by q_offset and keys by k_offset.
inline BandSlice Shift(const BandSlice& s, int64_t q_offset, int64_t k_offset) {
  const int64_t d = k_offset - q_offset;
  return {s.q_start + q_offset, s.q_end + q_offset, s.k_start + k_offset,
          s.k_end + k_offset,   s.d_min + d,        s.d_max + d};
}

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_BANDS_H_
