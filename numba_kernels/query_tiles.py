"""Query tiles that a block takes in turn, and what it has to know of each.

Twin: cuda_src/query_tiles.cuh.
"""

from collections import namedtuple

from numba import cuda
from numba.cuda import types

from .common import cdiv, div, head_tile, rem
from .scores import KeyRange, first_key, key_range, last_key

int32, uint32 = types.int32, types.uint32

# A query tile, the keys that some row of it sees, and which ones a row sees.
QueryTile = namedtuple("QueryTile", "batch_index head q_start k_start k_end band")

TILE_WORDS = 9  # of a QueryTile in shared memory


@cuda.jit(device=True, forceinline=True)
def query_tile(
    BLOCK_M, BLOCK_N, FEATURES, tile, tiles, score, heads_q, seqlen_q, seqlen_k, heads_at_a_time
):
    tiles_q = uint32(cdiv(uint32(seqlen_q), BLOCK_M))
    heads_total = uint32(div(tiles, tiles_q))
    head, tile = head_tile(tile, tiles_q, heads_total, uint32(heads_at_a_time))
    batch_index = int32(div(head, uint32(heads_q)))
    head = int32(rem(head, uint32(heads_q)))
    q_start = int32((tiles_q - 1 - tile) * BLOCK_M)
    band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
    k_start = int32(div(first_key(FEATURES, band, q_start), BLOCK_N) * BLOCK_N)
    k_end = last_key(FEATURES, band, int32(q_start + BLOCK_M))
    return QueryTile(batch_index, head, q_start, k_start, k_end, band)


@cuda.jit(device=True, forceinline=True)
def put_tile(words, start, slot, t):
    at = start + slot * TILE_WORDS
    words[at], words[at + 1], words[at + 2] = t.batch_index, t.head, t.q_start
    words[at + 3], words[at + 4] = t.k_start, t.k_end
    words[at + 5], words[at + 6] = t.band.lo, t.band.hi
    words[at + 7], words[at + 8] = t.band.q_length, t.band.kv_length


@cuda.jit(device=True, forceinline=True)
def get_tile(words, start, slot):
    at = start + slot * TILE_WORDS
    band = KeyRange(words[at + 5], words[at + 6], words[at + 7], words[at + 8])
    return QueryTile(words[at], words[at + 1], words[at + 2], words[at + 3], words[at + 4], band)


# Where the keys end that 64 rows of a tile see, from row q_first on: in the tile's first key tile
# at the earliest.
@cuda.jit(device=True, forceinline=True)
def own_end(FEATURES, t, q_first):
    if q_first >= t.band.q_length:
        return int32(t.k_start + 1)
    return int32(max(t.k_start + 1, last_key(FEATURES, t.band, int32(q_first + 64))))
