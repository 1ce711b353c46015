#include "xla_ffi/solver/transfer.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace magi_jax::solver {

TransferTables SortPieces(const Pieces& p, int64_t num_ranks) {
  TransferTables out = {};
  std::vector<int64_t> order(p.size), rows(num_ranks * num_ranks, 0), slot(p.size);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::make_tuple(p.src[a], p.dst[a], p.dst_row[a], a) <
           std::make_tuple(p.src[b], p.dst[b], p.dst_row[b], b);
  });
  for (int64_t i : order) {
    int64_t& pair = rows[p.src[i] * num_ranks + p.dst[i]];
    slot[i] = pair;
    pair += p.n_rows[i];
    out.send.push_back({p.dst[i], p.src_row[i], p.dst_row[i], p.n_rows[i], slot[i]});
    out.send_rank.push_back(p.src[i]);
    out.dst_rows = std::max(out.dst_rows, p.dst_row[i] + p.n_rows[i]);
  }
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t s = 0; s < num_ranks; ++s) {
      int64_t& most = r == s ? out.self_rows : out.pair_rows;
      most = std::max(most, rows[r * num_ranks + s]);
    }
  }
  // Stable: pieces of one receiver and one row keep the order of the senders.
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::tie(p.dst[a], p.dst_row[a]) < std::tie(p.dst[b], p.dst_row[b]);
  });
  for (int64_t i : order) {
    out.recv.push_back({p.src[i], p.src_row[i], p.dst_row[i], p.n_rows[i], slot[i]});
    out.recv_rank.push_back(p.dst[i]);
  }
  return out;
}

}  // namespace magi_jax::solver
