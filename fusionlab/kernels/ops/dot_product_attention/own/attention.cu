// softmax(scores) * factors @ value without the matrix of scores, forward and backward; the meaning is that of reference.py.
//
// attention_forward  a block takes kRows query rows of one head and goes over the keys by FL_COLUMNS, with the softmax's maximum and sum
//                    carried along (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691).
// attention_query    the gradient of the query: the same loop, with the probabilities recomputed from what the forward saved.
// attention_keys     the gradients of key and value: a block takes kRows keys and goes over the query rows.
// Nothing is added by atomics: each result is a sum in one order, the same bits every time.
//
// Products are mma.sync: 16-bit operands with sums in float; float as three TF32 products of its upper and lower half (FL_TERMS 3: relative
// error below 2^-20) or as one (FL_TERMS 1, what XLA's default precision for float is as well). Probabilities stay in registers, where
// the fragment of a sum is the fragment of an operand. Tiles are double-buffered: cp.async brings the next one beside the products.
//
// One variant is compiled at a time, chosen by macros:
//   FL_T         of query, key, value, out and gradients: 0 float, 1 bfloat16, 2 half
//   FL_D, FL_DV  features of query and key, and of value: multiples of 8
//   FL_TILES, FL_WARPS, FL_COLUMNS   rows of a block are 16 * FL_TILES * FL_WARPS; a step takes FL_COLUMNS (a multiple of 16)
//   FL_CAUSAL, FL_MASK, FL_SOFTCAP   1: there is one
//   FL_WINDOW    1: a row sees the keys up to `left` before it and `right` after it (which says what a causal mask would: FL_CAUSAL is 0)
//   FL_BIAS      0 none, 1 float, 2 bfloat16, 3 half
//   FL_FACTORS   0 none, 1 bool, 2 float, 3 bfloat16, 4 half, 5 a dropout mask made here of a key (threefry.cuh)
//   FL_PLAIN     1: neither bias nor softcap nor a finite mask value, and scale > 0: scores are compared before they are scaled
//   FL_STATS     what the forward saves: 0 nothing, 1 the log of the sum of exp(s), 2 the largest score and the log of the rest
//   FL_ROUNDED   1: the forward also gives what `out` was rounded by
//   FL_GRADS     of attention_keys: 1 that of the key, 2 that of the value, 3 both
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../warp.cuh"
#if FL_FACTORS == 5
#include "threefry.cuh"
#endif

using Index = long long;

#if FL_T == 0
using T = float;
#elif FL_T == 1
using T = __nv_bfloat16;
#else
using T = __half;
#endif

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kThreads = 32 * FL_WARPS;
constexpr int kBlocks = FL_WARPS > 4 ? 1 : 2; // of a multiprocessor, at least
constexpr int kTiles = FL_TILES;
constexpr int kRows = 16 * FL_TILES * FL_WARPS;
constexpr int kColumns = FL_COLUMNS;
constexpr int kWord = 16 / sizeof(T);           // elements of 16 bytes
constexpr int kStep = FL_T == 0 ? 8 : 16;       // what one product contracts
constexpr int kUnrolled = FL_T == 0 ? 1 : 4;    // of the steps over features: all of them would spill registers with floats
constexpr int kD = (FL_D + 15) / 16 * 16;       // features with padding, which is 0
constexpr int kDV = (FL_DV + 15) / 16 * 16;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// A row-major tile in shared memory whose rows have kWidth elements. So that eight rows at one column lie in different banks, words of a
// row are exchanged by the row's number, or a row is padded by one word.
template <int kWidth> struct Tile {
  static constexpr int kWords = kWidth / kWord;
  static constexpr bool kSwizzled = FL_T != 0 && kWords % 8 == 0;
  static constexpr int kPitch = kSwizzled ? kWords : kWords + 1; // in words
  __device__ static constexpr int bytes(int rows) { return rows * kPitch * 16; }
  T* data;

  __device__ __forceinline__ T* word(int row, int number) const {
    return data + (row * kPitch + (kSwizzled ? number ^ (row & 7) : number)) * kWord;
  }
  __device__ __forceinline__ float at(int row, int column) const { // of float tiles, which are not swizzled
    return static_cast<float>(data[row * kPitch * kWord + column]);
  }
};

// Brings rows first, first + 1, ... of a matrix with `count` rows of kReal elements; what is outside is 0.
template <int kWidth, int kReal>
__device__ __forceinline__ void bring(const Tile<kWidth>& tile, const T* from, Index stride, int first, int rows, int count) {
  constexpr int kWords = Tile<kWidth>::kWords;
  for (int i = threadIdx.x; i < rows * kWords; i += kThreads) {
    const int row = i / kWords, word = i % kWords;
    const bool inside = first + row < count && word * kWord < kReal;
    copy_16(tile.word(row, word), inside ? from + (first + row) * stride + word * kWord : from, inside);
  }
}

__device__ __forceinline__ void bring_floats(float* to, const float* from, int first, int rows, int count) {
  for (int i = threadIdx.x; i < rows; i += kThreads) {
    const bool inside = first + i < count;
    copy_4(to + i, inside ? from + first + i : from, inside);
  }
}

// Fragments of operands.
#if FL_T == 0
constexpr int kParts = FL_TERMS == 3 ? 2 : 1; // upper and lower half
#else
constexpr int kParts = 1;
#endif
struct Left { // 16 x kStep
  unsigned part[kParts][4];
};
struct Right { // kStep x 8
  unsigned part[kParts][2];
};

#if FL_T == 0
template <typename Fragment> __device__ __forceinline__ void put(Fragment& to, int i, float x) {
  to.part[0][i] = round_tf32(x);
#if FL_TERMS == 3
  const float upper = __uint_as_float(to.part[0][i]);
  to.part[1][i] = upper == x ? 0u : round_tf32(x - upper); // not inf - inf
#endif
}
#endif

__device__ __forceinline__ void multiply(float (&sum)[4], const Left& a, const Right& b) {
#if FL_T == 1
  multiply_bf16(sum, a.part[0], b.part[0]);
#elif FL_T == 2
  multiply_half(sum, a.part[0], b.part[0]);
#else
#if FL_TERMS == 3
  multiply_tf32(sum, a.part[1], b.part[0]);
  multiply_tf32(sum, a.part[0], b.part[1]);
#endif
  multiply_tf32(sum, a.part[0], b.part[0]);
#endif
}

// A right operand of ones: times it, a left one is summed over its columns.
__device__ __forceinline__ Right ones() {
#if FL_T == 0
  Right one = {};
  for (int i = 0; i < 2; ++i) put(one, i, 1.0f);
  return one;
#else
  const unsigned pair = FL_T == 1 ? 0x3f803f80u : 0x3c003c00u;
  return {{{pair, pair}}};
#endif
}

__device__ __forceinline__ int lane_of() { return threadIdx.x % 32; }

// left[i][k] = tile[row + i][k + ...]
template <int kWidth> __device__ __forceinline__ void load_left(Left& to, const Tile<kWidth>& tile, int row, int k) {
  const int lane = lane_of();
#if FL_T == 0
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) put(to, i, tile.at(row + g + 8 * (i % 2), k + t + 4 * (i / 2)));
#else
  load_matrices(to.part[0], tile.word(row + lane % 16, k / 8 + lane / 16));
#endif
}

// right[k][j] = tile[column + j][k + ...]: two neighbours of 8 columns.
template <int kWidth>
__device__ __forceinline__ void load_right(Right (&to)[2], const Tile<kWidth>& tile, int column, int k) {
  const int lane = lane_of();
#if FL_T == 0
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) put(to[j], i, tile.at(column + 8 * j + g, k + t + 4 * i));
  }
#else
  unsigned four[4];
  load_matrices(four, tile.word(column + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2));
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i / 2].part[0][i % 2] = four[i];
#endif
}

// right[k][j] = tile[k + ...][column + j]: the same of a tile whose rows are contracted. With floats, k is taken in the order of `as_left`.
template <int kWidth>
__device__ __forceinline__ void load_right_by_rows(Right (&to)[2], const Tile<kWidth>& tile, int k, int column) {
  const int lane = lane_of();
#if FL_T == 0
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) put(to[j], i, tile.at(k + 2 * t + i, column + 8 * j + g));
  }
#else
  unsigned four[4];
  load_transposed(four, tile.word(k + lane % 16, column / 8 + lane / 16));
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i / 2].part[0][i % 2] = four[i];
#endif
}

#if FL_T != 0
__device__ __forceinline__ unsigned pair_of(float x, float y) {
#if FL_T == 1
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
#else
  const __half2 pair = __floats2half2_rn(x, y);
#endif
  return *reinterpret_cast<const unsigned*>(&pair);
}
#endif

// Sums over columns k ... k + kStep - 1 as the left operand of a product that contracts them. A thread holds columns 2t and 2t + 1: with
// floats they are taken as t and t + 4, an order that `load_right_by_rows` has too.
template <int kCount> __device__ __forceinline__ void as_left(Left& to, const float (&sums)[kCount][4], int k) {
#if FL_T == 0
  const float(&x)[4] = sums[k / 8];
  put(to, 0, x[0]);
  put(to, 1, x[2]);
  put(to, 2, x[1]);
  put(to, 3, x[3]);
#else
  const float(&x)[4] = sums[k / 8];
  const float(&y)[4] = sums[k / 8 + 1];
  to.part[0][0] = pair_of(x[0], x[1]);
  to.part[0][1] = pair_of(x[2], x[3]);
  to.part[0][2] = pair_of(y[0], y[1]);
  to.part[0][3] = pair_of(y[2], y[3]);
#endif
}

// sums += rows of `left` (this warp's) times rows of `right`, over all features.
template <int kWidth, int kCount>
__device__ __forceinline__ void multiply_rows(
    float (&sums)[kTiles][kCount][4], const Tile<kWidth>& left, int row, const Tile<kWidth>& right) {
#pragma unroll kUnrolled
  for (int k = 0; k < kWidth; k += kStep) {
    Left a[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) load_left(a[m], left, row + 16 * m, k);
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      Right b[2];
      load_right(b, right, 8 * n, k);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply(sums[m][n], a[m], b[0]);
        multiply(sums[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// sums += weights (kTiles x 16 rows, kColumns columns) times `tile`, which has a row for each column; totals += the sums of those rows of
// weights, as they are multiplied: rounded.
template <int kWidth, int kCount>
__device__ __forceinline__ void multiply_weights(
    float (&sums)[kTiles][kCount][4], const float (&weights)[kTiles][kColumns / 8][4], const Tile<kWidth>& tile,
    float (*totals)[4] = nullptr) {
#pragma unroll
  for (int k = 0; k < kColumns; k += kStep) {
    Left a[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      as_left(a[m], weights[m], k);
      if (totals) multiply(totals[m], a[m], ones());
    }
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      Right b[2];
      load_right_by_rows(b, tile, k, 8 * n);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply(sums[m][n], a[m], b[0]);
        multiply(sums[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// Where things are. A row of query, key, value and out is `row` elements from the next; an operand of the scores' shape has strides of 0
// where it broadcasts. `group`: query heads that share a head of key and value.
struct Rows {
  Index batch, head, row;
};
struct Scores {
  Index batch, head, row, column;
};
#define FL_GEOMETRY                                                                                                \
  int queries, int keys, int heads, int group, int left, int right, Index q_batch, Index q_head, Index q_row,          \
      Index k_batch, Index k_head, Index k_row, Index v_batch, Index v_head, Index v_row, Index o_batch, Index o_head, Index o_row,               \
      Index bias_batch, Index bias_head, Index bias_row, Index bias_column, Index mask_batch, Index mask_head,       \
      Index mask_row, Index mask_column, Index factors_batch, Index factors_head, Index factors_row,                 \
      Index factors_column, float scale, float softcap, float mask_value, float factors_scale, float keep
#define FL_TAKE_GEOMETRY                                                                                    \
  const Rows of_query{q_batch, q_head, q_row}, of_key{k_batch, k_head, k_row}, of_value{v_batch, v_head, v_row}, \
      of_out{o_batch, o_head, o_row};                                                                         \
  const Scores of_bias{bias_batch, bias_head, bias_row, bias_column},                                         \
      of_mask{mask_batch, mask_head, mask_row, mask_column},                                                  \
      of_factors{factors_batch, factors_head, factors_row, factors_column};                                   \
  (void)of_query, (void)of_key, (void)of_value, (void)of_out, (void)of_bias, (void)of_mask, (void)of_factors, \
      (void)left, (void)right

template <typename E> __device__ __forceinline__ E* rows_at(E* base, const Rows& of, int batch, int head) {
  return base + batch * of.batch + head * of.head;
}

#if FL_BIAS == 1
using BiasT = float;
#elif FL_BIAS == 2
using BiasT = __nv_bfloat16;
#elif FL_BIAS == 3
using BiasT = __half;
#else
using BiasT = void;
#endif
#if FL_FACTORS == 1
using FactorsT = unsigned char;
#elif FL_FACTORS == 2
using FactorsT = float;
#elif FL_FACTORS == 3
using FactorsT = __nv_bfloat16;
#elif FL_FACTORS == 4
using FactorsT = __half;
#else
using FactorsT = unsigned; // the two words of a key
#endif

// What makes a score of a product of query and key, for one head.
struct Meaning {
  const BiasT* bias;
  const unsigned char* mask;
  const FactorsT* factors;
  Scores of_bias, of_mask, of_factors;
  int queries, keys, left, right;
  float scale, softcap, mask_value, factors_scale, keep;
  unsigned long long first; // of this head's entries among the random bits

  __device__ __forceinline__ void head_at(
      const void* bias_, const unsigned char* mask_, const void* factors_, int batch, int head) {
#if FL_BIAS
    bias = static_cast<const BiasT*>(bias_) + batch * of_bias.batch + head * of_bias.head;
#endif
#if FL_MASK
    mask = mask_ + batch * of_mask.batch + head * of_mask.head;
#endif
#if FL_FACTORS == 5
    factors = static_cast<const FactorsT*>(factors_);
    first = batch * of_factors.batch + head * of_factors.head;
#elif FL_FACTORS
    factors = static_cast<const FactorsT*>(factors_) + batch * of_factors.batch + head * of_factors.head;
#endif
  }

  // The score (FL_PLAIN: before it is scaled), whether the row sees the key, and the derivative of the softcap.
  __device__ __forceinline__ float score(float product, int row, int column, bool& seen, float& slope) const {
    const bool inside = row < queries && column < keys;
    seen = inside;
    slope = 1.0f;
    float s = product;
#if !FL_PLAIN
    s *= scale;
#endif
#if FL_SOFTCAP
    const float tanh = tanhf(s / softcap);
    s = softcap * tanh;
    slope = 1.0f - tanh * tanh;
#endif
#if FL_BIAS
    if (inside) s += static_cast<float>(bias[row * of_bias.row + column * of_bias.column]);
#endif
#if FL_MASK
    if (inside && !mask[row * of_mask.row + column * of_mask.column]) {
      seen = false;
      s = mask_value;
    }
#endif
#if FL_CAUSAL
    if (column > row) {
      seen = false;
      s = -infinity();
    }
#elif FL_WINDOW
    if (column - row > right || row - column > left) {
      seen = false;
      s = -infinity();
    }
#endif
    return column < keys ? s : -infinity();
  }

  // weights = factor(p): p times the factor, without factors_scale.
  __device__ __forceinline__ float weigh(float p, int row, int column) const {
#if FL_FACTORS == 0
    return p;
#else
    if (row >= queries || column >= keys) return 0.0f;
#if FL_FACTORS == 1
    return factors[row * of_factors.row + column * of_factors.column] ? p : 0.0f;
#elif FL_FACTORS == 5
    const unsigned long long entry = first + static_cast<unsigned long long>(row) * keys + column;
    return kept(factors[0], factors[1], entry, keep) ? p : 0.0f;
#else
    return p * static_cast<float>(factors[row * of_factors.row + column * of_factors.column]);
#endif
#endif
  }

  // The probability, of what the forward saved for the row.
  __device__ __forceinline__ float probability(float s, float statistic, float log_sum) const {
#if FL_PLAIN
    return exp2_of(fmaf(s, scale * kLog2E, -statistic * kLog2E));
#elif FL_STATS == 2
    return exp2_of((s - statistic - log_sum) * kLog2E);
#else
    return exp2_of((s - statistic) * kLog2E);
#endif
  }
};

#define FL_MEANING                                                                                                  \
  Meaning {                                                                                                         \
    nullptr, nullptr, nullptr, of_bias, of_mask, of_factors, queries, keys, left, right, scale, softcap, mask_value, \
        factors_scale, keep, 0                                                                                                     \
  }

// Row and column, within the tile of its block, of entry e of the fragment of a sum.
__device__ __forceinline__ int row_in(int e) { return lane_of() / 4 + 8 * (e / 2); }
__device__ __forceinline__ int column_in(int e) { return lane_of() % 4 * 2 + e % 2; }
__device__ __forceinline__ int warp_row() { return threadIdx.x / 32 * 16 * kTiles; }

__device__ __forceinline__ void put_pair(T* at, float x, float y) {
#if FL_T == 0
  *reinterpret_cast<float2*>(at) = float2{x, y};
#else
  *reinterpret_cast<unsigned*>(at) = pair_of(x, y);
#endif
}

#if FL_T != 0
// What is left of a number that is rounded to T.
__device__ __forceinline__ float left_of(float x) { return x - static_cast<float>(static_cast<T>(x)); }
#endif

// Writes a warp's rows of sums, times `by`, to rows first + ... of a matrix with `count` rows of kReal elements; what they were rounded by
// to `rounded`, if it is given.
template <int kReal, int kCount>
__device__ __forceinline__ void write(
    T* to, Index stride, int first, int count, const float (&sums)[kTiles][kCount][4], float by, T* rounded = nullptr) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + warp_row() + 16 * m + row_in(2 * half);
      if (row >= count) continue;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const int column = 8 * n + column_in(0);
        if (column >= kReal) continue;
        const float x = sums[m][n][2 * half] * by, y = sums[m][n][2 * half + 1] * by;
        put_pair(to + row * stride + column, x, y);
#if FL_T != 0
        if (rounded) put_pair(rounded + row * stride + column, left_of(x), left_of(y));
#endif
      }
    }
  }
}

// Over the four threads that hold a row.
__device__ __forceinline__ float max_of_row(float x) {
  x = fmaxf(x, from_lane(x, 1));
  return fmaxf(x, from_lane(x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
  x += from_lane(x, 1);
  return x + from_lane(x, 2);
}

__device__ __forceinline__ int steps_of(int count) { return (count + kColumns - 1) / kColumns; }

// The first step over a row's columns of which one is seen by rows first ... first + kRows - 1, up to `reach` before them; one at least
// is taken, for rows that see none.
__device__ __forceinline__ int begin_of(int first, int reach, int steps) {
  const int begin = first > reach ? (first - reach) / kColumns : 0;
  return begin < steps ? begin : steps - 1;
}
// The end of the steps over `count` columns, of which rows up to first + kRows - 1 see those up to `reach` after them.
__device__ __forceinline__ int end_of(int first, int reach, int count) {
  const Index reached = static_cast<Index>(first) + kRows + reach;
  return steps_of(reached < count ? static_cast<int>(reached) : count);
}

#ifdef FL_FORWARD
// Blocks along x take rows from the last to the first: with a causal mask those have most to do.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) attention_forward(
    const T* query, const T* key, const T* value, const void* bias, const unsigned char* mask, const void* factors,
    T* out, float* statistic, float* log_sum, T* rounded, FL_GEOMETRY) {
  FL_TAKE_GEOMETRY;
  const int first = (gridDim.x - 1 - blockIdx.x) * kRows, head = blockIdx.y, batch = blockIdx.z;
  const T* q = rows_at(query, of_query, batch, head);
  const T* k = rows_at(key, of_key, batch, head / group);
  const T* v = rows_at(value, of_value, batch, head / group);
  Meaning meaning = FL_MEANING;
  meaning.head_at(bias, mask, factors, batch, head);

  unsigned char* at = shared_memory;
  const Tile<kD> queries_in{reinterpret_cast<T*>(at)};
  at += Tile<kD>::bytes(kRows);
  Tile<kD> keys_in[2];
  Tile<kDV> values_in[2];
  for (int i = 0; i < 2; ++i) {
    keys_in[i].data = reinterpret_cast<T*>(at);
    at += Tile<kD>::bytes(kColumns);
    values_in[i].data = reinterpret_cast<T*>(at);
    at += Tile<kDV>::bytes(kColumns);
  }

#if FL_WINDOW
  const int steps = end_of(first, right, keys), begin = begin_of(first, left, steps);
#else
  const int steps = FL_CAUSAL ? end_of(first, 0, keys) : steps_of(keys), begin = 0;
#endif
  bring<kD, FL_D>(queries_in, q, of_query.row, first, kRows, queries);
  bring<kD, FL_D>(keys_in[begin % 2], k, of_key.row, begin * kColumns, kColumns, keys);
  bring<kDV, FL_DV>(values_in[begin % 2], v, of_value.row, begin * kColumns, kColumns, keys);

  float sums[kTiles][kDV / 8][4] = {};
  // `total` is the sum of the weights as they are multiplied, rounded: out is a mean of values then, which the backward's row sums rely on.
  // With factors the weights are others than those the softmax adds up: each thread has its part of those.
  float top[kTiles][2], total[kTiles][4] = {};
#pragma unroll
  for (int m = 0; m < kTiles; ++m) top[m][0] = top[m][1] = -infinity();
#if FL_PLAIN
  const float by = scale * kLog2E;
#else
  const float by = kLog2E;
#endif

  for (int step = begin; step < steps; ++step) {
    copies_done();
    __syncthreads();
    const int next = (step + 1) * kColumns, column = step * kColumns;
    if (step + 1 < steps) {
      bring<kD, FL_D>(keys_in[(step + 1) % 2], k, of_key.row, next, kColumns, keys);
      bring<kDV, FL_DV>(values_in[(step + 1) % 2], v, of_value.row, next, kColumns, keys);
    }
    float s[kTiles][kColumns / 8][4] = {};
    multiply_rows(s, queries_in, warp_row(), keys_in[step % 2]);

#if FL_PLAIN && !FL_MASK
#if FL_WINDOW
    const int top_row = first + warp_row();
    const bool whole = next <= keys && next - 1 - top_row <= right && top_row + 16 * kTiles - 1 - column <= left;
#else
    const bool whole = next <= keys && (!FL_CAUSAL || next - 1 <= first + warp_row());
#endif
#else
    const bool whole = false;
#endif
    if (!whole) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            bool seen;
            float slope;
            const int row = first + warp_row() + 16 * m + row_in(e);
            s[m][n][e] = meaning.score(s[m][n][e], row, column + 8 * n + column_in(e), seen, slope);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = top[m][half];
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        most = max_of_row(most);
        const float base = most == -infinity() ? 0.0f : most;
        const float shrink = exp2_of((top[m][half] - base) * by);
        top[m][half] = most;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
#if FL_PLAIN && !FL_FACTORS
            float p = exp2_of(fmaf(s[m][n][e], by, -base * by));
#else
            float p = exp2_of((s[m][n][e] - base) * by); // 1 where it is the largest, which no rounding changes
#endif
#if FL_FACTORS
            sum += p;
#endif
            const int row = first + warp_row() + 16 * m + row_in(e);
            s[m][n][e] = meaning.weigh(p, row, column + 8 * n + column_in(e));
          }
        }
        total[m][2 * half] = total[m][2 * half] * shrink + sum;
#pragma unroll
        for (int n = 0; n < kDV / 8; ++n) {
          sums[m][n][2 * half] *= shrink;
          sums[m][n][2 * half + 1] *= shrink;
        }
      }
    }
    multiply_weights(sums, s, values_in[step % 2], FL_FACTORS ? nullptr : total);
  }

#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = FL_FACTORS ? sum_of_row(total[m][2 * half]) : total[m][2 * half];
      float inverse = sum == 0.0f ? 0.0f : 1.0f / sum; // 0: the row sees no key
#if FL_FACTORS
      inverse *= factors_scale;
#endif
#pragma unroll
      for (int n = 0; n < kDV / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
#if FL_FACTORS == 1 || FL_FACTORS == 5
          // 0 where boolean factors leave nothing, also of a row whose sum is NaN.
          sums[m][n][e] = sums[m][n][e] == 0.0f ? 0.0f : sums[m][n][e] * inverse;
#else
          sums[m][n][e] *= inverse;
#endif
        }
      }
#if FL_STATS
      const int row = first + warp_row() + 16 * m + row_in(2 * half);
      if (lane_of() % 4 == 0 && row < queries) {
        const Index entry = (static_cast<Index>(batch) * heads + head) * queries + row;
#if FL_PLAIN
        const float most = top[m][half] * scale;
#else
        const float most = top[m][half];
#endif
        // 0 of a row that sees no key: its probabilities are exp(-inf) again.
#if FL_STATS == 2
        statistic[entry] = sum == 0.0f ? 0.0f : most;
        log_sum[entry] = sum == 0.0f ? 0.0f : logf(sum);
#else
        statistic[entry] = sum == 0.0f ? 0.0f : most + logf(sum);
#endif
      }
#endif
    }
  }
  T* rest = FL_ROUNDED ? rows_at(rounded, of_out, batch, head) : nullptr;
  write<FL_DV>(rows_at(out, of_out, batch, head), of_out.row, first, queries, sums, 1.0f, rest);
}
#endif

// Backward. With p the probabilities, f the factors and delta = rowsum(ct * out): weights = p f, dvalue = weights^T ct,
// ds = p (f (ct value^T) - delta) where a row sees the key, dquery = scale * ds key, dkey = scale * ds^T query. `delta`, and what the
// forward saved, have an entry for each row of query.

#ifdef FL_BACKWARD_QUERY
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) attention_query(
    const T* query, const T* key, const T* value, const void* bias, const unsigned char* mask, const void* factors,
    const float* statistic, const float* log_sum, const float* delta, const T* ct, T* dquery, FL_GEOMETRY) {
  FL_TAKE_GEOMETRY;
  const int first = (gridDim.x - 1 - blockIdx.x) * kRows, head = blockIdx.y, batch = blockIdx.z;
  const T* k = rows_at(key, of_key, batch, head / group);
  const T* v = rows_at(value, of_value, batch, head / group);
  Meaning meaning = FL_MEANING;
  meaning.head_at(bias, mask, factors, batch, head);

  unsigned char* at = shared_memory;
  const Tile<kD> queries_in{reinterpret_cast<T*>(at)};
  at += Tile<kD>::bytes(kRows);
  const Tile<kDV> cts_in{reinterpret_cast<T*>(at)};
  at += Tile<kDV>::bytes(kRows);
  Tile<kD> keys_in[2];
  Tile<kDV> values_in[2];
  for (int i = 0; i < 2; ++i) {
    keys_in[i].data = reinterpret_cast<T*>(at);
    at += Tile<kD>::bytes(kColumns);
    values_in[i].data = reinterpret_cast<T*>(at);
    at += Tile<kDV>::bytes(kColumns);
  }

#if FL_WINDOW
  const int steps = end_of(first, right, keys), begin = begin_of(first, left, steps);
#else
  const int steps = FL_CAUSAL ? end_of(first, 0, keys) : steps_of(keys), begin = 0;
#endif
  bring<kD, FL_D>(queries_in, rows_at(query, of_query, batch, head), of_query.row, first, kRows, queries);
  bring<kDV, FL_DV>(cts_in, rows_at(ct, of_out, batch, head), of_out.row, first, kRows, queries);
  bring<kD, FL_D>(keys_in[begin % 2], k, of_key.row, begin * kColumns, kColumns, keys);
  bring<kDV, FL_DV>(values_in[begin % 2], v, of_value.row, begin * kColumns, kColumns, keys);

  float of_row[kTiles][2], log_of_row[kTiles][2] = {}, delta_of_row[kTiles][2];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + warp_row() + 16 * m + row_in(2 * half);
      const Index entry = (static_cast<Index>(batch) * heads + head) * queries + (row < queries ? row : 0);
      of_row[m][half] = statistic[entry];
#if FL_STATS == 2
      log_of_row[m][half] = log_sum[entry];
#endif
      delta_of_row[m][half] = delta[entry];
    }
  }

  float sums[kTiles][kD / 8][4] = {};
  for (int step = begin; step < steps; ++step) {
    copies_done();
    __syncthreads();
    const int next = (step + 1) * kColumns, column = step * kColumns;
    if (step + 1 < steps) {
      bring<kD, FL_D>(keys_in[(step + 1) % 2], k, of_key.row, next, kColumns, keys);
      bring<kDV, FL_DV>(values_in[(step + 1) % 2], v, of_value.row, next, kColumns, keys);
    }
    float s[kTiles][kColumns / 8][4] = {}, dw[kTiles][kColumns / 8][4] = {};
    multiply_rows(s, queries_in, warp_row(), keys_in[step % 2]);
    multiply_rows(dw, cts_in, warp_row(), values_in[step % 2]);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = first + warp_row() + 16 * m + row_in(e), at_column = column + 8 * n + column_in(e);
          bool seen;
          float slope;
          const float score = meaning.score(s[m][n][e], row, at_column, seen, slope);
          const float p = meaning.probability(score, of_row[m][e / 2], log_of_row[m][e / 2]);
#if FL_FACTORS
          const float given = meaning.weigh(dw[m][n][e], row, at_column) * factors_scale;
#else
          const float given = dw[m][n][e];
#endif
          s[m][n][e] = seen ? p * (given - delta_of_row[m][e / 2]) * slope : 0.0f;
        }
      }
    }
    multiply_weights(sums, s, keys_in[step % 2]);
  }
  // dquery is laid out as query is.
  write<FL_D>(rows_at(dquery, of_query, batch, head), of_query.row, first, queries, sums, scale);
}
#endif

#ifdef FL_BACKWARD_KEYS
// `heads` are those of the query; a block takes a head of key and value, and each of the `group` query heads that share it.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) attention_keys(
    const T* query, const T* key, const T* value, const void* bias, const unsigned char* mask, const void* factors,
    const float* statistic, const float* log_sum, const float* delta, const T* ct, T* dkey, T* dvalue, FL_GEOMETRY) {
  FL_TAKE_GEOMETRY;
  constexpr bool kWantKey = FL_GRADS & 1, kWantValue = FL_GRADS & 2;
  const int first = blockIdx.x * kRows, kv_head = blockIdx.y, batch = blockIdx.z;
  Meaning meaning = FL_MEANING;

  unsigned char* at = shared_memory;
  const Tile<kD> keys_in{reinterpret_cast<T*>(at)};
  at += Tile<kD>::bytes(kRows);
  const Tile<kDV> values_in{reinterpret_cast<T*>(at)};
  at += Tile<kDV>::bytes(kRows);
  Tile<kD> queries_in[2];
  Tile<kDV> cts_in[2];
  float* rows_in[2];
  for (int i = 0; i < 2; ++i) {
    queries_in[i].data = reinterpret_cast<T*>(at);
    at += Tile<kD>::bytes(kColumns);
    cts_in[i].data = reinterpret_cast<T*>(at);
    at += Tile<kDV>::bytes(kColumns);
    rows_in[i] = reinterpret_cast<float*>(at); // statistic, log_sum, delta
    at += 3 * kColumns * 4;
  }

  bring<kD, FL_D>(keys_in, rows_at(key, of_key, batch, kv_head), of_key.row, first, kRows, keys);
  if (kWantKey) bring<kDV, FL_DV>(values_in, rows_at(value, of_value, batch, kv_head), of_value.row, first, kRows, keys);

  // The rows that see these keys: with a window, from `right` before the first of them to `left` after the last.
#if FL_WINDOW
  const int begin = first > right ? (first - right) / kColumns : 0, end = end_of(first, left, queries);
#else
  const int begin = FL_CAUSAL ? first / kColumns : 0, end = steps_of(queries);
#endif
  const int per_head = end > begin ? end - begin : 0;
  const int steps = per_head * group;
  const auto bring_step = [&](int step) {
    const int head = kv_head * group + step / per_head, row = (begin + step % per_head) * kColumns;
    const Index entries = (static_cast<Index>(batch) * heads + head) * queries;
    bring<kD, FL_D>(queries_in[step % 2], rows_at(query, of_query, batch, head), of_query.row, row, kColumns, queries);
    bring<kDV, FL_DV>(cts_in[step % 2], rows_at(ct, of_out, batch, head), of_out.row, row, kColumns, queries);
    float* to = rows_in[step % 2];
    bring_floats(to, statistic + entries, row, kColumns, queries);
#if FL_STATS == 2
    bring_floats(to + kColumns, log_sum + entries, row, kColumns, queries);
#endif
    if (kWantKey) bring_floats(to + 2 * kColumns, delta + entries, row, kColumns, queries);
  };
  if (steps) bring_step(0);

  float dk[kTiles][kWantKey ? kD / 8 : 2][4] = {}, dv[kTiles][kWantValue ? kDV / 8 : 2][4] = {};
  for (int step = 0; step < steps; ++step) {
    copies_done();
    __syncthreads();
    if (step + 1 < steps) bring_step(step + 1);
    const int row = (begin + step % per_head) * kColumns;
    meaning.head_at(bias, mask, factors, batch, kv_head * group + step / per_head);
    const float* in = rows_in[step % 2];

    // Transposed: rows of these are keys, columns are rows of query.
    float s[kTiles][kColumns / 8][4] = {}, dw[kTiles][kColumns / 8][4] = {};
    multiply_rows(s, keys_in, warp_row(), queries_in[step % 2]);
    if (kWantKey) multiply_rows(dw, values_in, warp_row(), cts_in[step % 2]);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at_key = first + warp_row() + 16 * m + row_in(e), number = 8 * n + column_in(e);
          bool seen;
          float slope;
          const float score = meaning.score(s[m][n][e], row + number, at_key, seen, slope);
          float p = meaning.probability(score, in[number], FL_STATS == 2 ? in[kColumns + number] : 0.0f);
          if (row + number >= queries) p = 0.0f;
#if FL_FACTORS
          const float given = meaning.weigh(dw[m][n][e], row + number, at_key) * factors_scale;
          s[m][n][e] = meaning.weigh(p, row + number, at_key);
#else
          const float given = dw[m][n][e];
          s[m][n][e] = p;
#endif
          if (kWantKey) dw[m][n][e] = seen ? p * (given - in[2 * kColumns + number]) * slope : 0.0f;
        }
      }
    }
    if constexpr (kWantValue) multiply_weights(dv, s, cts_in[step % 2]);
    if constexpr (kWantKey) multiply_weights(dk, dw, queries_in[step % 2]);
  }
  // The gradients are laid out as key and value are.
  if constexpr (kWantKey) write<FL_D>(rows_at(dkey, of_key, batch, kv_head), of_key.row, first, keys, dk, scale);
  if constexpr (kWantValue) {
    write<FL_DV>(rows_at(dvalue, of_value, batch, kv_head), of_value.row, first, keys, dv, FL_FACTORS ? factors_scale : 1.0f);
  }
}
#endif
