// Which keys a query sees, and the score it gives them. Twin: numba_kernels/scores.py
//
//   score(row, col) = cap(scale * q_row . k_col) + bias(row, col)    where row sees col, else -inf
//   cap(x)          = softcap * tanh(x / softcap)                    with SOFTCAP, else x
//
// Row i sees keys  max(0, i + lo) <= j < min(kv_length, i + hi)  if i < q_length, and of those the
// ones its mask allows. Without a mask that is a band, which also tells the tiles that need no work
// and the tiles that need no tests:
//
//            keys
//           # # - - - - |      first_key, last_key: the keys that some row of a query tile sees
//    rows   # # # - - - |      first_query, last_query: the rows that see some key of a key tile
//           - # # # - - |      tile_is_unmasked: all rows of a tile see all keys of it
//           - - # # # - | kv_length = 6
//           -----------
//           q_length = 4       lo = -1, hi = 2
//
// Ends are exclusive. FEATURES is the set of options in use; one that is off costs no instruction.
#pragma once

#include "common.cuh"

constexpr int RANGE = 1;    // causal, windows, lengths
constexpr int MASK = 2;     // boolean mask
constexpr int BIAS = 4;     // added to the score
constexpr int SOFTCAP = 8;  // squashes the score into (-softcap, softcap)
// Of what other kernels take as it comes, a kernel may want to know:
constexpr int ANY_SCALE = 16;   // a scale that may be 0 or negative
constexpr int KV_LENGTHS = 32;  // keys of a batch element may end before those of the array

constexpr int64 OPEN_WINDOW = 1 << 30;    // a window without an end; sequences are shorter
constexpr int64 LIMIT = OPEN_WINDOW - 1;  // |lo|, |hi| <= LIMIT, so that row + lo fits in an int

template <typename Acc>
struct ScoreParams {
  double scale, softcap;
  int64 window_left, window_right;  // keys to either side of the row's own; causal is right = 0
  int64 top_left;                   // 1: row i stands at key i; 0: at i + kv_length - q_length
  const int* q_lengths;             // (batch,), or null: all of seqlen_q
  const int* kv_lengths;            // (batch,), or null: all of seqlen_k
  const uint8* mask;                // (batch, heads_q, seqlen_q, seqlen_k), 0 hides
  Strides4 mask_strides;
  const Acc* bias;  // (batch, heads_q, seqlen_q, seqlen_k)
  Strides4 bias_strides;
};

struct KeyRange {
  int lo, hi, q_length, kv_length;
};

template <int FEATURES, typename Acc>
__device__ __forceinline__ KeyRange
key_range(const ScoreParams<Acc>& score, int64 batch_index, int64 seqlen_q, int64 seqlen_k) {
  KeyRange band = {-int(LIMIT), int(LIMIT), int(seqlen_q), int(seqlen_k)};
  if (FEATURES & RANGE) {
    const int* q_lengths = score.q_lengths;
    const int* kv_lengths = score.kv_lengths;
    if (q_lengths) band.q_length = max(0, min(q_lengths[batch_index], band.q_length));
    if (kv_lengths) band.kv_length = max(0, min(kv_lengths[batch_index], band.kv_length));
    int64 shift = score.top_left ? 0 : band.kv_length - band.q_length;
    if (score.window_left < OPEN_WINDOW) band.lo = int(max(-LIMIT, shift - score.window_left));
    if (score.window_right < OPEN_WINDOW) band.hi = int(min(LIMIT, shift + score.window_right + 1));
  }
  return band;
}

template <int FEATURES>
__device__ __forceinline__ int first_key(KeyRange band, int q_start) {
  if (!(FEATURES & RANGE)) return 0;
  return q_start < band.q_length ? max(0, q_start + band.lo) : band.kv_length;
}

template <int FEATURES>
__device__ __forceinline__ int last_key(KeyRange band, int q_end) {
  if (!(FEATURES & RANGE)) return band.kv_length;
  return min(band.kv_length, min(q_end, band.q_length) - 1 + band.hi);
}

template <int FEATURES>
__device__ __forceinline__ int first_query(KeyRange band, int k_start) {
  if (!(FEATURES & RANGE)) return 0;
  return k_start < band.kv_length ? max(0, k_start - band.hi + 1) : band.q_length;
}

template <int FEATURES>
__device__ __forceinline__ int last_query(KeyRange band, int k_end) {
  if (!(FEATURES & RANGE)) return band.q_length;
  return min(band.q_length, min(k_end, band.kv_length) - band.lo);
}

// Rows q_start .. q_end and keys k_start .. k_end all exist, and all see each other.
template <int FEATURES>
__device__ __forceinline__ bool tile_is_unmasked(KeyRange band,
                                                 int q_start,
                                                 int q_end,
                                                 int k_start,
                                                 int k_end) {
  if (FEATURES & MASK) return false;
  bool exists = q_end <= band.q_length && k_end <= band.kv_length;
  if (!(FEATURES & RANGE)) return exists;
  return exists && q_end - 1 + band.lo <= k_start && k_end <= q_start + band.hi;
}

// False where row or col does not exist, and only then is the mask not read.
template <int FEATURES, typename Acc>
__device__ __forceinline__ bool sees(const ScoreParams<Acc>& score,
                                     KeyRange band,
                                     int64 batch_index,
                                     int64 head,
                                     int row,
                                     int col) {
  bool seen = row < band.q_length && col < band.kv_length;
  if (FEATURES & RANGE) seen = seen && row + band.lo <= col && col < row + band.hi;
  if (FEATURES & MASK) {
    Strides4 at = score.mask_strides;
    seen =
        seen && score.mask[batch_index * at.batch + head * at.head + row * at.row + col * at.col];
  }
  return seen;
}

// Hides what rows and keys do not see of each other in accumulators (ptx_sm80.cuh), where no mask
// does; row and col are those of s[0]. Counted from col, a score's column is a constant: one
// comparison each, and a second one only where a window begins.
template <int FEATURES, int N>
__device__ __forceinline__ void hide(float (&s)[N], KeyRange band, int row, int col) {
#pragma unroll
  for (int half = 0; half < 2; ++half, row += 8) {
    int begin = 0, end = band.kv_length;
    if (FEATURES & RANGE) begin = row + band.lo - col, end = min(end, row + band.hi);
    end = row < band.q_length ? end - col : 0;
#pragma unroll
    for (int i = 2 * half; i < N; i += i % 2 ? 3 : 1) {
      if (i / 4 * 8 + i % 2 >= end) s[i] = -INF;
    }
    if (begin <= 0) continue;
#pragma unroll
    for (int i = 2 * half; i < N; i += i % 2 ? 3 : 1) {
      if (i / 4 * 8 + i % 2 < begin) s[i] = -INF;
    }
  }
}

// The score before the bias; dot is q_row . k_col.
template <int FEATURES, typename Acc>
__device__ __forceinline__ Acc capped_score(const ScoreParams<Acc>& score, Acc dot) {
  Acc s = dot * Acc(score.scale);
  if (FEATURES & SOFTCAP) {
    Acc softcap = Acc(score.softcap);
    s = softcap * tanh(s * (1 / softcap));  // one division for all elements
  }
  return s;
}

// Adds the bias of a row and a col that exist. A bias of -inf hides the key, whatever its score.
template <int FEATURES, typename Acc>
__device__ __forceinline__ Acc biased_score(const ScoreParams<Acc>& score,
                                            Acc capped,
                                            int64 batch_index,
                                            int64 head,
                                            int row,
                                            int col) {
  Acc s = capped;
  if (FEATURES & BIAS) {
    Strides4 at = score.bias_strides;
    Acc bias = score.bias[batch_index * at.batch + head * at.head + row * at.row + col * at.col];
    s = bias == -INF ? bias : s + bias;
  }
  return s;
}

// The score that a row gives a col which it sees.
template <int FEATURES, typename Acc>
__device__ __forceinline__ Acc
score_of(const ScoreParams<Acc>& score, Acc dot, int64 batch_index, int64 head, int row, int col) {
  Acc capped = capped_score<FEATURES>(score, dot);
  return biased_score<FEATURES>(score, capped, batch_index, head, row, col);
}

// Backward through the cap: from the gradient of capped_score to that of scale * dot.
template <int FEATURES, typename Acc>
__device__ __forceinline__ Acc uncapped_gradient(const ScoreParams<Acc>& score,
                                                 Acc ds,
                                                 Acc capped) {
  if (FEATURES & SOFTCAP) {
    Acc t = capped * (1 / Acc(score.softcap));
    ds *= 1 - t * t;
  }
  return ds;
}

// What to subtract from the scores of a row, given their maximum or lse. That is -inf where the row
// saw nothing: with 0 in its place exp(-inf - 0) is 0, where (-inf) - (-inf) would be NaN.
template <typename Acc>
__device__ __forceinline__ Acc finite_or_zero(Acc x) {
  return x == -INF ? Acc(0) : x;
}

// A score's exponent of two is score * factor - row_max * factor in one multiply-add: factor is
// log2(e) times a scale. Of the two products only the second is rounded on its own, and of numbers
// from 2^28 on by 16 and more: the largest exponent would not be 0, and p could overflow. There a
// power of two is the factor, which rounds nothing. Scores of that size differ by 16 or not at all,
// so that either factor leaves the smaller ones no weight.
struct Exponent {
  float factor, subtrahend;
};

__device__ __forceinline__ Exponent exponent_of(float row_max, float to_log2) {
  float power_of_two = __int_as_float((__float_as_int(to_log2) + 0x7fffff) & 0x7f800000);
  float scaled = row_max * to_log2, scaled_exactly = row_max * power_of_two;
  bool huge = fabsf(scaled) >= 0x1p28f;
  return {huge ? power_of_two : to_log2, huge ? scaled_exactly : scaled};
}
