// LayerNorm and RMSNorm of s = x + shift + residual, rounded to the dtype of x, over rows of FL_N: out = (s - mean) rstd scale + bias
// (norm_forward), and its gradients in one pass over the rows (norm_backward): a thread keeps the same columns for many rows and sums what
// belongs to them in registers, each block writes what it summed, and norm_sum adds that up in a fixed order. Where a row is too wide for
// that, norm_backward leaves the sums over rows to norm_columns, which reads the arrays once more. All are bound by memory. plan.py chooses
// the geometry.
//
//   FL_KIND    0 norm_forward, 1 norm_backward (and norm_sum), 2 norm_columns (and norm_sum)
//   FL_T       storage of x, residual, out, ct, dx: 0 float, 1 bfloat16, 2 half. Arithmetic, statistics and sums are in float.
//   FL_SCALE, FL_BIAS, FL_SHIFT  storage of these vectors and of their gradients: as FL_T, or -1 where there is none
//   FL_READS_SCALE  1: there is a scale, and what is computed reads it
//   FL_ADDS_SHIFT  1: shift is to be added; 0: there is none, or it is in what is read already
//   FL_RMS     1: no mean is subtracted
//   FL_N       columns
//   FL_VEC     neighbours that a thread takes at once, up to 16 bytes of FL_T; a divisor of FL_N
//   FL_LANES   threads of a row, a power of 2: part of a warp with FL_GROUPS rows in a block, or whole warps
//   FL_VECS    vectors of a thread in a row
//   FL_HOLD    1: a thread keeps its part of a row in registers; 0: it reads it again, from the cache mostly
#include "../packs.cuh"
#include "../early.cuh"

using T = Storage<FL_T>::Type;
using Scale = Storage<FL_SCALE>::Type;
using Bias = Storage<FL_BIAS>::Type;
using Shift = Storage<FL_SHIFT>::Type;
constexpr bool kHasScale = FL_READS_SCALE, kHasBias = FL_BIAS >= 0, kHasShift = FL_ADDS_SHIFT;
constexpr int kUnits = FL_N / FL_VEC; // vectors of a row
constexpr float kShare = 1.f / FL_N;

#if FL_KIND < 2
constexpr int kWarps = FL_LANES > 32 ? FL_LANES / 32 : 1; // of a row
constexpr int kThreads = FL_LANES * FL_GROUPS;
constexpr bool kWhole = kUnits == FL_LANES * FL_VECS; // no thread has less than others

__device__ __forceinline__ int unit_of(int i) { return i * FL_LANES + static_cast<int>(threadIdx.x); }
__device__ __forceinline__ bool has_unit(int i) { return kWhole || unit_of(i) < kUnits; }

// Calls use(i) for every vector that a thread has in a row.
template <typename Use> __device__ __forceinline__ void each_unit(bool inside, const Use& use) {
  constexpr int kAtOnce = FL_HOLD || FL_VECS < 4 ? FL_VECS : 4;
#pragma unroll kAtOnce
  for (int i = 0; i < FL_VECS; ++i) {
    if (inside && has_unit(i)) use(i);
  }
}

// Sums over the threads of a row, in each of them. Calls take turns with two places in shared memory, so that one barrier is enough.
template <int kCount> struct RowSum {
  int turn = 0;
  __device__ __forceinline__ void operator()(float (&sums)[kCount]) {
    constexpr int kOfWarp = FL_LANES < 32 ? FL_LANES : 32;
#pragma unroll
    for (int other = 1; other < kOfWarp; other *= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], other);
    }
    if constexpr (kWarps > 1) {
      __shared__ float parts[2][kWarps][kCount];
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) parts[turn][threadIdx.x / 32][i] = sums[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += parts[turn][w][i];
        sums[i] = total;
      }
      turn ^= 1;
    }
  }
};
#endif

#if FL_KIND == 0
//   FL_RESIDUAL, FL_SUM, FL_SAVES  1: there is a residual; s is given; mean (LayerNorm) and rstd are given
extern "C" __global__ void __launch_bounds__(kThreads) norm_forward(
    const T* x, const T* residual, const Shift* shift, const Scale* scale, const Bias* bias, T* out, T* sum, float* means,
    float* rstds, Index rows, float epsilon) {
  fl_wait();
  constexpr int kHeld = FL_HOLD ? FL_VECS : 1;
  Pack<T> held[kHeld];
  RowSum<1> row_sum;
  for (Index first = static_cast<Index>(blockIdx.x) * FL_GROUPS; first < rows; first += static_cast<Index>(gridDim.x) * FL_GROUPS) {
    const Index row = first + threadIdx.y;
    const bool inside = row < rows;
    const Index start = row * FL_N;

    // s at a thread's i-th vector.
    const auto make = [&](Pack<T>& s, int i) {
      const Index column = unit_of(i) * FL_VEC;
      s.load_last(x + start + column);
      if constexpr (FL_RESIDUAL || kHasShift) {
        float values[FL_VEC], more[FL_VEC];
        unpack(s, values);
        if constexpr (kHasShift) {
          values_at(shift, column, more);
#pragma unroll
          for (int j = 0; j < FL_VEC; ++j) values[j] += more[j];
        }
        if constexpr (FL_RESIDUAL) {
          Pack<T> other;
          other.load_last(residual + start + column);
          unpack(other, more);
#pragma unroll
          for (int j = 0; j < FL_VEC; ++j) values[j] += more[j];
        }
        pack_into(s, values);
      }
    };
    // What a thread has of s at its i-th vector.
    const auto values_of = [&](int i, float (&values)[FL_VEC]) {
      if (!FL_HOLD) make(held[0], i);
      unpack(held[FL_HOLD ? i : 0], values);
    };
    if (FL_HOLD) each_unit(inside, [&](int i) { make(held[FL_HOLD ? i : 0], i); });

    float mean = 0;
    if constexpr (!FL_RMS) {
      float total[1] = {};
      each_unit(inside, [&](int i) {
        float values[FL_VEC];
        values_of(i, values);
#pragma unroll
        for (int j = 0; j < FL_VEC; ++j) total[0] += values[j];
      });
      row_sum(total);
      mean = total[0] * kShare;
    }
    float squares[1] = {};
    each_unit(inside, [&](int i) {
      float values[FL_VEC];
      values_of(i, values);
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) squares[0] += (values[j] - mean) * (values[j] - mean);
    });
    row_sum(squares);
    const float rstd = rsqrtf(squares[0] * kShare + epsilon);
    if (FL_SAVES && inside && threadIdx.x == 0) {
      if (!FL_RMS) means[row] = mean;
      rstds[row] = rstd;
    }
    each_unit(inside, [&](int i) {
      const Index column = unit_of(i) * FL_VEC;
      float values[FL_VEC], made[FL_VEC], factor[FL_VEC];
      values_of(i, values);
      if (FL_SUM) held[FL_HOLD ? i : 0].store(sum + start + column);
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) made[j] = (values[j] - mean) * rstd;
      if constexpr (kHasScale) {
        values_at(scale, column, factor);
#pragma unroll
        for (int j = 0; j < FL_VEC; ++j) made[j] *= factor[j];
      }
      if constexpr (kHasBias) {
        values_at(bias, column, factor);
#pragma unroll
        for (int j = 0; j < FL_VEC; ++j) made[j] += factor[j];
      }
      Pack<T> pack;
      pack_into(pack, made);
      pack.store(out + start + column);
    });
  }
}
#endif

#if FL_KIND > 0
//   FL_CT_SUM  1: s has a cotangent too
//   FL_CTS     of how many arrays the cotangent of out is the sum
//   FL_WANT    bits: 1 dx, 2 dscale, 4 dbias, 8 dshift
constexpr int kWant = FL_WANT;
constexpr int kGrads = ((kWant & 2) != 0) + ((kWant & 4) != 0) + ((kWant & 8) != 0);
// Places of the sums over rows.
constexpr int kOfScale = 0, kOfBias = (kWant & 2) != 0, kOfShift = kOfBias + ((kWant & 4) != 0);

// What is read of a row at one vector, and what of it becomes s.
struct Given {
  Pack<T> ct[FL_CTS], s, ct_sum;

  __device__ __forceinline__ void load(const T* const (&cts)[4], const T* xs, const T* ct_sums, Index at) {
#pragma unroll
    for (int k = 0; k < FL_CTS; ++k) ct[k].load_last(cts[k] + at);
    if (kWant & 11) s.load_last(xs + at);
    if (FL_CT_SUM && (kWant & 9)) ct_sum.load_last(ct_sums + at);
  }
  // The sum of the arrays into the first, each addition rounded as one of its own is.
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int k = 1; k < FL_CTS; ++k) {
      float sum[FL_VEC], more[FL_VEC];
      unpack(ct[0], sum);
      unpack(ct[k], more);
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) sum[j] += more[j];
      pack_into(ct[0], sum);
    }
  }
  // s less the mean, over the standard deviation.
  __device__ __forceinline__ void normalised(const float* shift, float mean, float rstd, float (&to)[FL_VEC]) const {
    unpack(s, to);
    if constexpr (kHasShift) {
      Pack<T> rounded;
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) to[j] += shift[j];
      pack_into(rounded, to);
      unpack(rounded, to);
    }
#pragma unroll
    for (int j = 0; j < FL_VEC; ++j) to[j] = (to[j] - mean) * rstd;
  }
};
#endif

#if FL_KIND == 1
//   FL_AHEAD   1: a thread loads its part of the next row before it works on this one (FL_HOLD)
//   FL_BLOCKS  blocks that a multiprocessor is to have room for
struct Row {
  Given at[FL_HOLD ? FL_VECS : 1];
  float mean = 0, rstd = 0;
};

// On sm_100 and later a thread needs more registers than would leave room for that many.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kRoom = 1;
#else
constexpr int kRoom = FL_BLOCKS;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kRoom) norm_backward(
    const T* ct, const T* ct_1, const T* ct_2, const T* ct_3, const T* ct_sum, const T* x, const Shift* shift, const Scale* scale,
    const float* means, const float* rstds, T* dx, float* parts_scale, float* parts_bias, float* parts_shift, Index rows) {
  fl_wait();
  const T* const cts[4] = {ct, ct_1, ct_2, ct_3};
  constexpr int kSums = kGrads ? kGrads : 1;
  float sums[kSums][FL_VECS][FL_VEC] = {};
  Pack<Scale> factors[FL_HOLD && FL_VECS <= 4 ? FL_VECS : 1];
  constexpr bool kFactorsStay = kHasScale && FL_HOLD && FL_VECS <= 4;
  RowSum<FL_RMS ? 1 : 2> row_sum;
  if constexpr (kFactorsStay) {
#pragma unroll
    for (int i = 0; i < FL_VECS; ++i) {
      if (has_unit(i)) factors[i].load(scale + unit_of(i) * FL_VEC);
    }
  }
  const auto load = [&](Row& to, Index row) {
    if (row >= rows) return;
    if (!FL_RMS) to.mean = means[row];
    to.rstd = rstds[row];
    if constexpr (FL_HOLD) {
#pragma unroll
      for (int i = 0; i < FL_VECS; ++i) {
        if (has_unit(i)) to.at[i].load(cts, x, ct_sum, row * FL_N + unit_of(i) * FL_VEC);
      }
    }
  };
  const Index step = static_cast<Index>(gridDim.x) * FL_GROUPS;
  const Index begin = static_cast<Index>(blockIdx.x) * FL_GROUPS;
  Row now, next;
  if (FL_AHEAD) load(now, begin + threadIdx.y);
  for (Index first = begin; first < rows; first += step) {
    const Index row = first + threadIdx.y;
    const bool inside = row < rows;
    if (!FL_AHEAD) load(now, row);
    if (FL_AHEAD) load(next, row + step);
    if (FL_HOLD) each_unit(inside, [&](int i) { now.at[FL_HOLD ? i : 0].add_up(); });
    // At a thread's i-th vector: the cotangent, xhat, and the cotangent of that.
    const auto values_of = [&](int i, float (&of_out)[FL_VEC], float (&xhat)[FL_VEC], float (&inner)[FL_VEC]) {
      const Index column = unit_of(i) * FL_VEC;
      if (!FL_HOLD) {
        now.at[0].load(cts, x, ct_sum, row * FL_N + column);
        now.at[0].add_up();
      }
      const Given& given = now.at[FL_HOLD ? i : 0];
      float moved[FL_VEC];
      if constexpr (kHasShift) values_at(shift, column, moved);
      unpack(given.ct[0], of_out);
      given.normalised(moved, now.mean, now.rstd, xhat);
      if constexpr (kFactorsStay) {
        unpack(factors[kFactorsStay ? i : 0], inner);
      } else if constexpr (kHasScale) {
        values_at(scale, column, inner);
      }
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) inner[j] = kHasScale ? inner[j] * of_out[j] : of_out[j];
    };
    float through[FL_RMS ? 1 : 2] = {};
    each_unit(inside, [&](int i) {
      float of_out[FL_VEC], xhat[FL_VEC], inner[FL_VEC];
      values_of(i, of_out, xhat, inner);
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) {
        through[0] += inner[j] * xhat[j];
        if (!FL_RMS) through[FL_RMS ? 0 : 1] += inner[j];
        if constexpr ((kWant & 2) != 0) sums[kOfScale][i][j] += of_out[j] * xhat[j];
        if constexpr ((kWant & 4) != 0) sums[kOfBias][i][j] += of_out[j];
      }
    });
    if constexpr ((kWant & 9) != 0) {
      row_sum(through);
      const float of_xhat = through[0] * kShare, of_one = FL_RMS ? 0.f : through[FL_RMS ? 0 : 1] * kShare;
      each_unit(inside, [&](int i) {
        float of_out[FL_VEC], xhat[FL_VEC], inner[FL_VEC], made[FL_VEC];
        values_of(i, of_out, xhat, inner);
#pragma unroll
        for (int j = 0; j < FL_VEC; ++j) made[j] = (inner[j] - of_one - xhat[j] * of_xhat) * now.rstd;
        if constexpr (FL_CT_SUM) {
          float more[FL_VEC];
          unpack(now.at[FL_HOLD ? i : 0].ct_sum, more);
#pragma unroll
          for (int j = 0; j < FL_VEC; ++j) made[j] += more[j];
        }
        if constexpr ((kWant & 8) != 0) {
#pragma unroll
          for (int j = 0; j < FL_VEC; ++j) sums[kOfShift][i][j] += made[j];
        }
        if constexpr ((kWant & 1) != 0) {
          Pack<T> pack;
          pack_into(pack, made);
          pack.store(dx + row * FL_N + unit_of(i) * FL_VEC);
        }
      });
    }
    if (FL_AHEAD) now = next;
  }
  if constexpr (kGrads > 0) {
    float* const parts[3] = {parts_scale, parts_bias, parts_shift};
    constexpr int kPlaces[3] = {kOfScale, kOfBias, kOfShift};
#if FL_GROUPS > 1
    // The rows of a block, one after another.
    __shared__ float shared[FL_N];
    for (int grad = 0; grad < 3; ++grad) {
      if (!(kWant >> (grad + 1) & 1)) continue;
      for (int group = 0; group < FL_GROUPS; ++group) {
        if (static_cast<int>(threadIdx.y) == group) {
#pragma unroll
          for (int i = 0; i < FL_VECS; ++i) {
            if (!has_unit(i)) continue;
#pragma unroll
            for (int j = 0; j < FL_VEC; ++j) {
              float value = 0;
#pragma unroll
              for (int k = 0; k < kSums; ++k) value = k == kPlaces[grad] ? sums[k][i][j] : value;
              float& place = shared[unit_of(i) * FL_VEC + j];
              place = group ? place + value : value;
            }
          }
        }
        __syncthreads();
      }
      const int thread = threadIdx.y * FL_LANES + threadIdx.x;
      for (int column = thread; column < FL_N; column += kThreads)
        parts[grad][static_cast<Index>(blockIdx.x) * FL_N + column] = shared[column];
      __syncthreads();
    }
#else
#pragma unroll
    for (int grad = 0; grad < 3; ++grad) {
      if (!(kWant >> (grad + 1) & 1)) continue;
#pragma unroll
      for (int i = 0; i < FL_VECS; ++i) {
        if (!has_unit(i)) continue;
        Pack<float> pack;
        pack_into(pack, sums[kPlaces[grad] < kSums ? kPlaces[grad] : 0][i]);
        pack.store(parts[grad] + static_cast<Index>(blockIdx.x) * FL_N + unit_of(i) * FL_VEC);
      }
    }
#endif
  }
}
#endif

#if FL_KIND == 2
// Sums over rows alone, of rows too wide for norm_backward: a warp has 32 vectors side by side, each of a block's warps its rows.
//   FL_HEIGHT  warps of a block
extern "C" __global__ void __launch_bounds__(32 * FL_HEIGHT) norm_columns(
    const T* ct, const T* x, const Shift* shift, const float* means, const float* rstds, const T* dx, float* parts_scale,
    float* parts_bias, float* parts_shift, Index rows) {
  fl_wait();
  __shared__ float shared[FL_HEIGHT][32][FL_VEC];
  const int unit = blockIdx.x * 32 + threadIdx.x;
  const bool has = unit < kUnits;
  const Index column = static_cast<Index>(unit) * FL_VEC;
  float sums[3][FL_VEC] = {}, moved[FL_VEC] = {};
  if constexpr (kHasShift) {
    if (has) values_at(shift, column, moved);
  }
  if (has) {
#pragma unroll 4
    for (Index row = static_cast<Index>(blockIdx.y) * FL_HEIGHT + threadIdx.y; row < rows; row += static_cast<Index>(gridDim.y) * FL_HEIGHT) {
      const Index at = row * FL_N + column;
      float cts[FL_VEC], xhat[FL_VEC];
      Given given;
      if constexpr ((kWant & 6) != 0) {
        given.ct[0].load(ct + at);
        unpack(given.ct[0], cts);
      }
      if constexpr ((kWant & 2) != 0) {
        given.s.load(x + at);
        given.normalised(moved, FL_RMS ? 0.f : means[row], rstds[row], xhat);
      }
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) {
        if constexpr ((kWant & 2) != 0) sums[0][j] += cts[j] * xhat[j];
        if constexpr ((kWant & 4) != 0) sums[1][j] += cts[j];
      }
      if constexpr ((kWant & 8) != 0) {
        values_at(dx, at, cts);
#pragma unroll
        for (int j = 0; j < FL_VEC; ++j) sums[2][j] += cts[j];
      }
    }
  }
  float* const parts[3] = {parts_scale, parts_bias, parts_shift};
#pragma unroll
  for (int grad = 0; grad < 3; ++grad) {
    if (!(kWant >> (grad + 1) & 1)) continue;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < FL_VEC; ++j) shared[threadIdx.y][threadIdx.x][j] = sums[grad][j];
    __syncthreads();
    if (threadIdx.y != 0 || !has) continue;
#pragma unroll
    for (int j = 0; j < FL_VEC; ++j) {
      float total = 0;
      for (int other = 0; other < FL_HEIGHT; ++other) total += shared[other][threadIdx.x][j];
      parts[grad][static_cast<Index>(blockIdx.y) * FL_N + column + j] = total;
    }
  }
}
#endif

#if FL_KIND > 0
extern "C" __global__ void __launch_bounds__(32 * FL_SUM_HEIGHT) norm_sum(
    const float* parts_scale, Scale* dscale, const float* parts_bias, Bias* dbias, const float* parts_shift, Shift* dshift,
    int parts) {
  fl_wait();
  int grad = blockIdx.y;
  if constexpr ((kWant & 2) != 0) {
    if (grad-- == 0) return sum_parts<FL_N, FL_SUM_HEIGHT>(parts_scale, dscale, parts);
  }
  if constexpr ((kWant & 4) != 0) {
    if (grad-- == 0) return sum_parts<FL_N, FL_SUM_HEIGHT>(parts_bias, dbias, parts);
  }
  if constexpr ((kWant & 8) != 0) {
    if (grad == 0) return sum_parts<FL_N, FL_SUM_HEIGHT>(parts_shift, dshift, parts);
  }
}
#endif
