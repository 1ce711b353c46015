// The loader warp: keeps shared memory full of queries, keys and values, as the walker's notes say.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_LOADER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_LOADER_H_

#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/tma.h"

namespace magi_jax::sm90 {

template <typename Traits>
struct Loader {
  const KernelParams& params;
  const CUtensorMap &q_map, &k_map, &v_map;
  SharedStorage<Traits>& shared;
  const int lane;

  uint32_t tiles = 0, blocks = 0;    // asked for so far
  int pending_key, pending_kv_head;  // of the last block, whose values are still to be asked for

  __device__ __forceinline__ Loader(const KernelParams& params, const CUtensorMap& q_map,
                                    const CUtensorMap& k_map, const CUtensorMap& v_map,
                                    SharedStorage<Traits>& shared)
      : params(params),
        q_map(q_map),
        k_map(k_map),
        v_map(v_map),
        shared(shared),
        lane(threadIdx.x % 32) {}

  __device__ void Work() {
    while (true) {
      const int slot = SlotOf<kNotes>(blocks);
      BarrierWait(&shared.note_full[slot], ParityOf<kNotes>(blocks));
      const BlockNote& note = shared.notes[slot];
      const BlockHeader header = note.header;
      if (header.flags & kEndOfWork) break;
      const TileNote tile = note.tile;
      const int kv_head = note.kv_head;
      if (header.flags & kFirstBlock) LoadQueries(tile);
      WaitForKeySlot();
      if (lane == 0) {
        const int k_slot = SlotOf<Traits::kStages>(blocks);
        uint64_t* barrier = &shared.k_full[k_slot];
        BarrierArriveExpect(barrier, Traits::kKBytes);
        LoadRows<Traits::kChunks>(shared.k[k_slot], k_map, barrier, kv_head, header.key_start);
      }
      // Values are needed one block later than keys, so they follow the next block's keys.
      if (blocks > 0) LoadPendingValues();
      ++blocks;
      pending_key = header.key_start;
      pending_kv_head = kv_head;
    }
    if (blocks > 0) LoadPendingValues();
    WaitForKeySlot();
    if (lane == 0) BarrierArrive(&shared.k_full[SlotOf<Traits::kStages>(blocks)]);
  }

 private:
  // When the keys that were in the slot are no longer needed, neither is the note about them.
  __device__ __forceinline__ void WaitForKeySlot() {
    BarrierWait(&shared.k_empty[SlotOf<Traits::kStages>(blocks)],
                ParityOf<Traits::kStages>(blocks) ^ 1);
    if (blocks >= Traits::kStages && (kEveryLaneArrives || lane == 0))
      BarrierArrive(&shared.note_empty[SlotOf<kNotes>(blocks - Traits::kStages)]);
  }

  __device__ __forceinline__ void LoadQueries(const TileNote& tile) {
    const int slot = SlotOf<Traits::kQStages>(tiles);
    BarrierWait(&shared.q_empty[slot], ParityOf<Traits::kQStages>(tiles) ^ 1);
    if (lane == 0) {
      uint64_t* barrier = &shared.q_full[slot];
      BarrierArriveExpect(barrier, Traits::kQBytes);
      uint8_t* destination = shared.q[slot];
#pragma unroll
      for (int i = 0; i < Traits::kConsumers * Traits::kChunks; ++i) {
        const int first_row = tile.token + (64 >> params.pack_log2) * (i / Traits::kChunks);
        CopyBox(destination + i * 64 * Traits::kRowBytes, &q_map, barrier,
                i % Traits::kChunks * kChunk, tile.Head(), first_row, kEvictFirst);
      }
    }
    ++tiles;
  }

  __device__ __forceinline__ void LoadPendingValues() {
    const int slot = SlotOf<Traits::kStages>(blocks - 1);
    BarrierWait(&shared.v_empty[slot], ParityOf<Traits::kStages>(blocks - 1) ^ 1);
    if (lane == 0) {
      uint64_t* barrier = &shared.v_full[slot];
      BarrierArriveExpect(barrier, Traits::kVBytes);
      LoadRows<Traits::kVChunks>(shared.v[slot], v_map, barrier, pending_kv_head, pending_key);
    }
  }

  template <int kChunks>
  __device__ __forceinline__ void LoadRows(uint8_t* destination, const CUtensorMap& map,
                                           uint64_t* barrier, int kv_head, int key) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint8_t* const rows = destination + chunk * Traits::kBlockN * Traits::kRowBytes;
      if (Partners<Traits>(params) == 1) {
        CopyBox(rows, &map, barrier, chunk * kChunk, kv_head, key, kEvictLast);
      } else {
        const int first = ClusterRank() * (Traits::kBlockN / 2);
        CopyBoxToPair(rows + first * Traits::kRowBytes, &map, barrier, chunk * kChunk, kv_head,
                      key + first, kEvictLast);
      }
    }
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_LOADER_H_
