// attention_flash_mma_fwd: the online softmax on tensor cores, in fp16 or bf16.
//
//   s = q k^T,  p = softmax(s),  out = p v,  lse = log(sum(exp(s)))
//
// As attention_flash_simt_fwd, with the products on tensor cores (fragments.cuh). A warp has whole
// rows of the scores, and p goes from the accumulators of one product to the operand of the next
// without leaving its registers. The softmax is taken to base 2 with the scale in its exponent: one
// multiply-add and one exp2 an element. With SPLIT the keys of a row are shared by several blocks,
// each with a partial result that attention_merge puts together: for few queries and many keys.
//
// Work split:    a block owns BLOCK_M query rows of one head (SPLIT: and a share of the keys), each
//                warp BLOCK_M / warps of the rows: 16 or 32
// Shared memory: the Q, K and V tiles; one buffer each is enough, as K is loaded while p v runs and
//                V while q k^T does. In the end Q holds the output, to be stored by whole rows
// Registers:     the scores and the output of the warp's rows, as accumulators of 16 x 8
// Twin:          numba_kernels/attention_flash_mma_fwd.py
// Launched by:   workbench/launchers.py, attention_flash_mma
#include "fragments.cuh"
#include "scores.cuh"

constexpr float SMALLEST = 1.1754944e-38f;  // normal float

template <typename T,
          int BLOCK_M,
          int BLOCK_N,
          int HEAD_DIM,
          int HEAD_DIM_V,
          int FEATURES,
          int SPLIT,
          int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    attention_flash_mma_fwd(const T* q,           // (batch, heads_q, seqlen_q, head_dim)
                            const T* k,           // (batch, heads_kv, seqlen_k, head_dim)
                            const T* v,           // (batch, heads_kv, seqlen_k, head_dim_v)
                            T* out,               // (batch, heads_q, seqlen_q, head_dim_v)
                            acc_t<T>* lse,        // (batch, heads_q, seqlen_q), contiguous
                            acc_t<T>* out_parts,  // (splits, batch, heads_q, seqlen_q, HEAD_DIM_V)
                            acc_t<T>* lse_parts,  // (splits, batch, heads_q, seqlen_q)
                            Strides q_strides,
                            Strides k_strides,
                            Strides v_strides,
                            Strides out_strides,
                            int64 batch,
                            int64 heads_q,
                            int64 heads_kv,
                            int64 seqlen_q,
                            int64 seqlen_k,
                            int64 head_dim,
                            int64 head_dim_v,
                            ScoreParams<acc_t<T>> score,
                            int64 heads_at_a_time) {
  constexpr int M = BLOCK_M / 16 / (THREADS / 32);  // accumulators of 16 x 8 a warp, downwards
  constexpr int KEYS = BLOCK_N / 8, DIMS = HEAD_DIM_V / 8;  // and across
  constexpr int Q_DIM = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;
  constexpr bool SCALED = FEATURES & (BIAS | SOFTCAP);  // before they are added up, not after

  extern __shared__ __align__(128) uint4 shared[];
  uint32 q_smem = shared_address(shared);
  uint32 k_smem = q_smem + tile_bytes<BLOCK_M, Q_DIM>();
  uint32 v_smem = k_smem + tile_bytes<BLOCK_N, HEAD_DIM>();

  // 1. Which rows are ours
  if (SPLIT) griddepcontrol_launch_dependents();
  uint32 heads_total = uint32(batch * heads_q), tiles_q = cdiv(uint32(seqlen_q), uint32(BLOCK_M));
  uint32 tiles = gridDim.x / heads_total, splits = tiles / tiles_q;  // tiles: with those of splits
  HeadTile at = head_tile(blockIdx.x, tiles, heads_total, uint32(heads_at_a_time));
  int split = SPLIT ? at.tile / tiles_q : 0;
  int batch_index = at.head / uint32(heads_q);
  int head = at.head % uint32(heads_q);
  int head_kv = uint32(head) / (uint32(heads_q) / uint32(heads_kv));
  int q_start = (tiles_q - 1 - (SPLIT ? at.tile % tiles_q : at.tile)) * BLOCK_M;
  int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  int warp_row = warp_id * (16 * M);
  int first_row = q_start + warp_row + lane_id / 4, first_col = lane_id % 4 * 2;

  KeyRange band = key_range<FEATURES>(score, batch_index, seqlen_q, seqlen_k);
  int k_start = first_key<FEATURES>(band, q_start) / BLOCK_N * BLOCK_N;
  int k_end = last_key<FEATURES>(band, q_start + BLOCK_M);
  if (SPLIT && k_start < k_end) {
    int share = cdiv(cdiv(k_end - k_start, BLOCK_N), int(splits)) * BLOCK_N;
    k_start += split * share;
    k_end = min(k_end, k_start + share);
  }

  // 2. Load the Q tile
  load_tile<BLOCK_M, HEAD_DIM, THREADS>(q_smem,
                                        q + offset_of(q_strides, batch_index, head, q_start),
                                        q_strides.row, band.q_length - q_start, int(head_dim));
  load_tile<BLOCK_N, HEAD_DIM, THREADS>(k_smem,
                                        k + offset_of(k_strides, batch_index, head_kv, k_start),
                                        k_strides.row, k_end - k_start, int(head_dim));

  // 3. Start the running softmax
  float row_max[M][2], row_sum[M][2], acc[M][DIMS][4] = {};
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[m][half] = -INF;
      row_sum[m][half] = 0;  // of this thread's keys alone, until the end
    }
  }
  // s * to_log2 is the exponent of two. The largest s is to be the largest score, so a negative
  // scale goes with -q; and 0 times -inf would be NaN, so a scale of 0 is a tiny one.
  float to_log2 = SCALED ? LOG2E : max(float(fabs(score.scale)) * LOG2E, SMALLEST);
  if (!SCALED && score.scale < 0) {
    negate_copied<BLOCK_M, HEAD_DIM, THREADS>(reinterpret_cast<char*>(shared));
  }

  // 4. Walk over the key/value tiles
  uint32 q_lane = lane_address<DOWN_FIRST, HEAD_DIM>(q_smem, warp_row, 0);
  uint32 k_lane = lane_address<ACROSS_FIRST, HEAD_DIM>(k_smem, 0, 0);
  uint32 v_lane = lane_address<DOWN_FIRST, HEAD_DIM_V>(v_smem, 0, 0);
  for (; k_start < k_end; k_start += BLOCK_N) {
    q_lane = fresh(q_lane), k_lane = fresh(k_lane);

    // 4a. Load the K and V tiles
    cp_async_wait_all();
    __syncthreads();  // K is there, and V is free: every warp is past the last p v
    load_tile<BLOCK_N, HEAD_DIM_V, THREADS>(v_smem,
                                            v + offset_of(v_strides, batch_index, head_kv, k_start),
                                            v_strides.row, k_end - k_start, int(head_dim_v));

    // 4b. s = q k^T, masked
    float s[M][KEYS][4] = {};
    multiply_nt<T, HEAD_DIM, HEAD_DIM, HEAD_DIM, 1>(s, q_lane, k_lane);
    bool unmasked =
        tile_is_unmasked<FEATURES>(band, q_start, q_start + BLOCK_M, k_start, k_start + BLOCK_N);
    if (SCALED) {
#pragma unroll
      for (int i = 0; i < 4 * M * KEYS; ++i) {
        float& x = s[i / 4 / KEYS][i / 4 % KEYS][i % 4];
        x = capped_score<FEATURES>(score, x);
      }
    }
    if (!unmasked || FEATURES & BIAS) {  // a loop of its own: most tiles go past it
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 4 * KEYS; ++i) {
          int row = first_row + m * 16 + i % 4 / 2 * 8;
          int col = k_start + first_col + i / 4 * 8 + i % 2;
          float& x = s[m][i / 4][i % 4];
          bool seen = unmasked || sees<FEATURES>(score, band, batch_index, head, row, col);
          x = seen ? biased_score<FEATURES>(score, x, batch_index, head, row, col) : -INF;
        }
      }
    }

    // 4c. Rescale what we have to the new maximum
    uint32 p[KEYS / 2][M][4];  // in the layout of an operand
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tile_max = -INF;
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
          tile_max = max(tile_max, max(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        float new_max = max(row_max[m][half], warp_max<4>(tile_max));
        float shift = finite_or_zero(new_max);
        Exponent of = exponent_of(shift, to_log2);
        float rescale = ex2_approx((row_max[m][half] - shift) * to_log2);
        row_max[m][half] = new_max;
        row_sum[m][half] *= rescale;
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
          float x = ex2_approx(fmaf(s[m][n][2 * half], of.factor, -of.subtrahend));
          float y = ex2_approx(fmaf(s[m][n][2 * half + 1], of.factor, -of.subtrahend));
          row_sum[m][half] += x + y;
          p[n / 2][m][n % 2 * 2 + half] = cvt_rn_x2<T>(x, y);
        }
#pragma unroll
        for (int n = 0; n < DIMS; ++n) {
          acc[m][n][2 * half] *= rescale;
          acc[m][n][2 * half + 1] *= rescale;
        }
      }
    }

    // 4d. acc += p v
    cp_async_wait_all();
    __syncthreads();  // V is there, and K is free
    int next = k_start + BLOCK_N;
    if (next < k_end) {
      load_tile<BLOCK_N, HEAD_DIM, THREADS>(k_smem,
                                            k + offset_of(k_strides, batch_index, head_kv, next),
                                            k_strides.row, k_end - next, int(head_dim));
    }
    multiply_rn<T, HEAD_DIM_V>(acc, p, v_lane);
  }
  cp_async_wait_all();
  __syncthreads();  // Q is free: without a tile nobody has waited for it

  // 5. Normalise and store
  int64 row_index = (batch_index * heads_q + head) * seqlen_q;
  if (SPLIT) {
    row_index += split * (batch * heads_q) * seqlen_q;
    lse = lse_parts;
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = first_row + m * 16 + half * 8;
      float sum = warp_sum<4>(row_sum[m][half]);
      float inverse = sum == 0 ? 0.0f : 1 / sum;  // a row that sees no key gives 0
#pragma unroll
      for (int n = 0; n < DIMS; ++n) {
        acc[m][n][2 * half] *= inverse;
        acc[m][n][2 * half + 1] *= inverse;
      }
      if (row < seqlen_q && first_col == 0) {
        lse[row_index + row] = (row_max[m][half] * to_log2 + lg2_approx(sum)) * LN2;
      }
    }
  }
  if (SPLIT) {
#pragma unroll
    for (int i = 0; i < 4 * M * DIMS; i += 2) {
      int row = first_row + i / 4 / DIMS * 16 + i % 4 / 2 * 8;
      float* to = out_parts + (row_index + row) * HEAD_DIM_V + first_col + i / 4 % DIMS * 8;
      const float* from = &acc[i / 4 / DIMS][i / 4 % DIMS][i % 4];
      if (row < seqlen_q) *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
    }
  } else {
    char* staged = reinterpret_cast<char*>(shared) + warp_row * row_bytes<HEAD_DIM_V>();
    store_accumulators<T, HEAD_DIM_V, 1>(staged + lane_id / 4 * row_bytes<HEAD_DIM_V>(), first_col,
                                         acc, 1.0f);
    __syncwarp();  // a warp stores its own rows
    store_tile<16 * M, HEAD_DIM_V, 32>(
        out + offset_of(out_strides, batch_index, head, q_start + warp_row), staged,
        out_strides.row, int(seqlen_q) - q_start - warp_row, int(head_dim_v), lane_id);
  }
}
