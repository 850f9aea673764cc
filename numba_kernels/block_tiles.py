"""Tiles that a block takes, and what it has to know of each.

Twin: cuda_src/block_tiles.cuh.
"""

from collections import namedtuple

from numba import cuda
from numba.cuda import types

from .common import cdiv, div, head_tile, rem
from .ptx_sm80 import atom_cas_acquire, ld_acquire
from .scores import KeyRange, first_key, first_query, key_range, last_key, last_query

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


# A key tile, and the query tiles of a head that have to do with it, from tile_first to tile_end:
# some row of each sees some key.
KeyTile = namedtuple("KeyTile", "batch_index head tile k_start tile_first tile_end band")


# The tile-th one: of each head the first ones, which most queries see, come first.
@cuda.jit(device=True, forceinline=True)
def key_tile(
    BLOCK_M, BLOCK_N, FEATURES, tile, score, batch, heads_kv, seqlen_q, seqlen_k, heads_at_a_time
):
    tiles_k = uint32(cdiv(uint32(seqlen_k), BLOCK_N))
    heads_total = uint32(batch * heads_kv)
    head, tile = head_tile(tile, tiles_k, heads_total, uint32(heads_at_a_time))
    batch_index = int32(div(head, uint32(heads_kv)))
    head = int32(rem(head, uint32(heads_kv)))
    tile, k_start = int32(tile), int32(tile * BLOCK_N)
    band = key_range(FEATURES, score, batch_index, seqlen_q, seqlen_k)
    q_first = first_query(FEATURES, band, k_start)
    q_last = last_query(FEATURES, band, int32(k_start + BLOCK_N))
    tile_first = int32(div(q_first, BLOCK_M))
    tile_end = int32(cdiv(q_last, BLOCK_M) if q_first < q_last else tile_first)
    return KeyTile(batch_index, head, tile, k_start, tile_first, tile_end, band)


# How many key tiles some row of a query tile sees before ours.
@cuda.jit(device=True, forceinline=True)
def turn_of(BLOCK_M, BLOCK_N, FEATURES, keys, q_tile):
    return int32(keys.tile - div(first_key(FEATURES, keys.band, int32(q_tile * BLOCK_M)), BLOCK_N))


# Each query tile has a counter of those who have added to its dq, if they do so in turn. Else it
# is 0 as long as nobody has come, BEING_STORED while the first one stores, and then one more.
# Waits until we may add, and tells whether we are the first, who stores. Before the copy engine
# does either, a fence_proxy_async_global is wanted.
BEING_STORED = 1


@cuda.jit(device=True, forceinline=True)
def wait_for_turn(DETERMINISTIC, counter, turn):
    if DETERMINISTIC:
        while ld_acquire(counter) != turn:
            pass
        return turn == 0
    found = atom_cas_acquire(counter, 0, BEING_STORED)
    while found == BEING_STORED:
        found = ld_acquire(counter)
    return found == 0
