// Tiles that a block takes, and what it has to know of each.
// Twin: numba_kernels/block_tiles.py
#pragma once

#include "ptx_sm80.cuh"
#include "scores.cuh"

// A query tile, the keys that some row of it sees, and which ones a row sees.
struct QueryTile {
  int batch_index, head, q_start, k_start, k_end;
  KeyRange band;
};

// The tile-th one: of each head the longest come first (common.cuh, head_tile).
template <int BLOCK_M, int BLOCK_N, int FEATURES, typename Acc>
__device__ __forceinline__ QueryTile query_tile(uint32 tile,
                                                uint32 tiles,
                                                const ScoreParams<Acc>& score,
                                                int64 heads_q,
                                                int64 seqlen_q,
                                                int64 seqlen_k,
                                                int64 heads_at_a_time) {
  uint32 tiles_q = cdiv(uint32(seqlen_q), uint32(BLOCK_M));
  HeadTile at = head_tile(tile, tiles_q, tiles / tiles_q, uint32(heads_at_a_time));
  QueryTile t;
  t.batch_index = at.head / uint32(heads_q);
  t.head = at.head % uint32(heads_q);
  t.q_start = (tiles_q - 1 - at.tile) * BLOCK_M;
  t.band = key_range<FEATURES>(score, t.batch_index, seqlen_q, seqlen_k);
  t.k_start = first_key<FEATURES>(t.band, t.q_start) / BLOCK_N * BLOCK_N;
  t.k_end = last_key<FEATURES>(t.band, t.q_start + BLOCK_M);
  return t;
}

// Where the keys end that 64 rows of a tile see, from row q_first on: in the tile's first key tile
// at the earliest.
template <int FEATURES>
__device__ __forceinline__ int own_end(const QueryTile& t, int q_first) {
  if (q_first >= t.band.q_length) return t.k_start + 1;
  return max(t.k_start + 1, last_key<FEATURES>(t.band, q_first + 64));
}

// A key tile, and the query tiles of a head that have to do with it, from tile_first to tile_end:
// some row of each sees some key.
struct KeyTile {
  int batch_index, head, tile, k_start, tile_first, tile_end;
  KeyRange band;
};

// The tile-th one: of each head the first ones, which most queries see, come first.
template <int BLOCK_M, int BLOCK_N, int FEATURES, typename Acc>
__device__ __forceinline__ KeyTile key_tile(uint32 tile,
                                            const ScoreParams<Acc>& score,
                                            int64 batch,
                                            int64 heads_kv,
                                            int64 seqlen_q,
                                            int64 seqlen_k,
                                            int64 heads_at_a_time) {
  uint32 tiles_k = cdiv(uint32(seqlen_k), uint32(BLOCK_N)), heads_total = uint32(batch * heads_kv);
  HeadTile at = head_tile(tile, tiles_k, heads_total, uint32(heads_at_a_time));
  KeyTile t;
  t.batch_index = at.head / uint32(heads_kv);
  t.head = at.head % uint32(heads_kv);
  t.tile = at.tile;
  t.k_start = t.tile * BLOCK_N;
  t.band = key_range<FEATURES>(score, t.batch_index, seqlen_q, seqlen_k);
  int q_first = first_query<FEATURES>(t.band, t.k_start);
  int q_last = last_query<FEATURES>(t.band, t.k_start + BLOCK_N);
  t.tile_first = q_first / BLOCK_M;
  t.tile_end = q_first < q_last ? cdiv(q_last, BLOCK_M) : t.tile_first;
  return t;
}

// How many key tiles some row of a query tile sees before ours.
template <int BLOCK_M, int BLOCK_N, int FEATURES>
__device__ __forceinline__ int turn_of(const KeyTile& keys, int q_tile) {
  return keys.tile - first_key<FEATURES>(keys.band, q_tile * BLOCK_M) / BLOCK_N;
}

// Each query tile has a counter of those who have added to its dq, if they do so in turn. Else it
// is 0 as long as nobody has come, BEING_STORED while the first one stores, and then one more.
// Waits until we may add, and tells whether we are the first, who stores. Before the copy engine
// does either, a fence_proxy_async_global is wanted.
constexpr int BEING_STORED = 1;
template <int DETERMINISTIC>
__device__ __forceinline__ bool wait_for_turn(int* counter, int turn) {
  if (DETERMINISTIC) {
    while (ld_acquire(counter) != turn) {
    }
    return turn == 0;
  }
  int found = atom_cas_acquire(counter, 0, BEING_STORED);
  while (found == BEING_STORED) found = ld_acquire(counter);
  return found == 0;
}
