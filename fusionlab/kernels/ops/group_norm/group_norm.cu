// GroupNorm of images [B, positions, FL_C], an activation behind it: out = act(h), h = xhat scale + bias, xhat = (x - mean) rstd, mean and
// rstd over all positions and the channels of a group. All kernels but the last have a grid of (splits, B): a block takes a chunk of the
// positions of one image, with all channels. Threads lie over vectors of channels (x) and over positions (y).
//
//   forward:   gn_stats leaves the moments of each chunk and group; gn_apply merges those of its image, and normalises its chunk.
//   backward:  with u = ct act'(h), gn_grad_sums leaves the sums of u and u xhat: of each chunk and channel, and, times scale, of each
//              chunk and group; gn_grad_x adds up those of its image's groups, gn_grad_vectors those of all chunks of a channel.
//
// The second look at x (and ct) begins where the first one ended: at what the cache has. Merges and sums have a fixed order.
// All are bound by memory. plan.py chooses the geometry.
//
//   FL_KIND    0 forward, 1 backward
//   FL_T       storage of x, out, ct, dx: 0 float, 1 bfloat16, 2 half. Arithmetic, statistics and sums are in float.
//   FL_SCALE, FL_BIAS  storage of these vectors and of their gradients: as FL_T, or -1 where there is none
//   FL_READS_SCALE, FL_READS_BIAS  1: there is one, and what is computed reads it
//   FL_ACT, FL_16BIT  the activation: ../gemm_epilogue/activation.cuh
//   FL_C, FL_G channels, groups
//   FL_VEC     neighbours that a thread takes at once, up to 16 bytes of FL_T; a divisor of FL_C
//   FL_LANES   threads along the channels of a position, each with FL_VECS vectors, FL_LANES apart
//   FL_HEIGHT  threads along positions
//   FL_TEAM    threads that share the merges of a group, a power of 2
//   FL_BLOCKS  blocks that a multiprocessor is to have room for
#include "../packs.cuh"
#include "../early.cuh"

using C = float;
#include "../activation.cuh"

using T = Storage<FL_T>::Type;
using Scale = Storage<FL_SCALE>::Type;
using Bias = Storage<FL_BIAS>::Type;
constexpr int kUnits = FL_C / FL_VEC; // vectors of a position
constexpr int kPerGroup = FL_C / FL_G;
constexpr int kThreads = FL_LANES * FL_HEIGHT;
constexpr bool kWhole = kUnits == FL_LANES * FL_VECS; // no thread has less than others

__device__ __forceinline__ bool has(int i) { return kWhole || i * FL_LANES + static_cast<int>(threadIdx.x) < kUnits; }
__device__ __forceinline__ int column_of(int i) { return (i * FL_LANES + static_cast<int>(threadIdx.x)) * FL_VEC; }
__device__ __forceinline__ int group_of(int column, int j) { // one for a whole vector, where that lies within a group
  return kPerGroup % FL_VEC == 0 ? column / kPerGroup : (column + j) / kPerGroup;
}

// What a thread has for each of its channels.
using Own = float[FL_VECS][FL_VEC];

template <typename Use> __device__ __forceinline__ void each_channel(const Use& use) {
#pragma unroll
  for (int i = 0; i < FL_VECS; ++i) {
    if (!has(i)) continue;
#pragma unroll
    for (int j = 0; j < FL_VEC; ++j) use(i, j, column_of(i) + j);
  }
}

template <typename E> __device__ __forceinline__ void load_own(const E* from, Own& to) {
#pragma unroll
  for (int i = 0; i < FL_VECS; ++i) {
    if (has(i)) values_at(from, column_of(i), to[i]);
  }
}

// Of [FL_G]: the entry of each channel's group.
__device__ __forceinline__ void load_of_group(const float* from, Own& to) {
  each_channel([&](int i, int j, int) { to[i][j] = from[group_of(column_of(i), j)]; });
}

// rstd scale.
__device__ __forceinline__ void load_factors(const float* rstds, const Scale* scale, Own& to) {
  load_of_group(rstds, to);
  if constexpr (FL_READS_SCALE) {
    Own scales = {};
    load_own(scale, scales);
    each_channel([&](int i, int j, int) { to[i][j] *= scales[i][j]; });
  }
}

// Positions [first, first + count) of an image, those of a chunk.
struct Chunk {
  Index first, count;
};
__device__ __forceinline__ Chunk chunk_of(Index number, Index positions) {
  const Index size = (positions + gridDim.x - 1) / gridDim.x, first = number * size, left = positions - first;
  return {first, left <= 0 ? 0 : left < size ? left : size};
}
// How many of them are those of the threads at one y.
__device__ __forceinline__ int rows_of(const Chunk& chunk, int y) {
  return static_cast<int>((chunk.count - y + FL_HEIGHT - 1) / FL_HEIGHT);
}

// A thread's vectors of one position.
struct Vectors {
  Pack<T> at[FL_VECS];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < FL_VECS; ++i) {
      if (has(i)) at[i].load(from + column_of(i));
    }
  }
  __device__ __forceinline__ void load_last(const T* from) {
#pragma unroll
    for (int i = 0; i < FL_VECS; ++i) {
      if (has(i)) at[i].load_last(from + column_of(i));
    }
  }
};

// Calls use(held, at) for a thread's positions of its block's chunk, `at` the offset of a position's first channel, after load(held, at), the
// loads of some positions at once; kBack: from the last position to the first.
template <typename Held, int kAtOnce, bool kBack, typename Load, typename Use>
__device__ __forceinline__ void each_position(Index positions, const Load& load, const Use& use) {
  const Chunk chunk = chunk_of(blockIdx.x, positions);
  const int rows = rows_of(chunk, threadIdx.y);
  const Index start = blockIdx.y * positions + chunk.first + threadIdx.y;
  for (int done = 0; done < rows; done += kAtOnce) {
    Held held[kAtOnce];
    Index at[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int row = kBack ? rows - 1 - done - k : done + k;
      at[k] = (start + static_cast<Index>(row) * FL_HEIGHT) * FL_C;
      if (done + k < rows) load(held[k], at[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (done + k < rows) use(held[k], at[k]);
    }
  }
}

// The mean of so many numbers and the sum of the squares of what they are apart from it.
struct Moments {
  float mean, squares;
};
// Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1.
__device__ __forceinline__ Moments merged(Moments a, float count, Moments b, float more) {
  const float share = more > 0.f ? more / (count + more) : 0.f, apart = b.mean - a.mean;
  return {a.mean + apart * share, a.squares + b.squares + apart * apart * (count * share)};
}

struct Sums {
  float first, second;
};
__device__ __forceinline__ Sums merged(Sums a, float, Sums b, float) { return {a.first + b.first, a.second + b.second}; }

__device__ constexpr int half_of(int rows) { // the largest power of 2 that is less
  int half = 1;
  while (2 * half < rows) half *= 2;
  return half;
}

// What the threads of a column have of its channels, merged: shared[channel]. `give` says what a thread has, of how many positions.
template <typename Kind, typename Give>
__device__ __forceinline__ const Kind* over_rows(Index positions, const Give& give) {
  constexpr int kHalf = half_of(FL_HEIGHT);
  __shared__ Kind shared[kHalf][FL_C];
  const int y = threadIdx.y;
  Kind own[FL_VECS][FL_VEC] = {};
  each_channel([&](int i, int j, int) { own[i][j] = give(i, j); });
  const Chunk chunk = chunk_of(blockIdx.x, positions);
  // Of how many positions the thread at `row` has merged what there is, once those `step` rows on and further are merged into others.
  const auto count_at = [&](int row, int step) {
    Index count = 0;
    for (int other = row; other < FL_HEIGHT; other += step) count += rows_of(chunk, other);
    return static_cast<float>(count);
  };
  if constexpr (FL_HEIGHT > 1) {
#pragma unroll 1
    for (int half = kHalf; half >= 1; half /= 2) {
      if (y >= half && y < 2 * half) each_channel([&](int i, int j, int c) { shared[y - half][c] = own[i][j]; });
      __syncthreads();
      if (y < half && y + half < FL_HEIGHT) {
        const float count = count_at(y, 2 * half), more = count_at(y + half, 2 * half);
        each_channel([&](int i, int j, int c) { own[i][j] = merged(own[i][j], count, shared[y][c], more); });
      }
      __syncthreads();
    }
  }
  if (y == 0) each_channel([&](int i, int j, int c) { shared[0][c] = own[i][j]; });
  __syncthreads();
  return shared[0];
}

// For each group what there is of it merged: read(group, item) of so many items, each of weight(item) numbers; then give(group, merged, of
// how many numbers), by one thread.
template <typename Kind, typename Read, typename Weight, typename Give>
__device__ __forceinline__ void over_groups(int items, const Read& read, const Weight& weight, const Give& give) {
  __shared__ Kind shared[kThreads];
  __shared__ float counts[kThreads];
  const int thread = threadIdx.y * FL_LANES + threadIdx.x, member = thread % FL_TEAM;
  for (int first = 0; first < FL_G; first += kThreads / FL_TEAM) {
    const int group = first + thread / FL_TEAM;
    Kind all{};
    float count = 0;
    if (group < FL_G) {
#pragma unroll 4
      for (int item = member; item < items; item += FL_TEAM) {
        const float more = weight(item);
        all = merged(all, count, read(group, item), more);
        count += more;
      }
    }
    if constexpr (FL_TEAM > 1) { // then all groups are done in one go
      shared[thread] = all;
      counts[thread] = count;
      __syncthreads();
      if (member == 0) {
        for (int other = thread + 1; other < thread + FL_TEAM && other < kThreads; ++other) {
          all = merged(all, count, shared[other], counts[other]);
          count += counts[other];
        }
      }
    }
    if (member == 0 && group < FL_G) give(group, all, count);
  }
}

// The place of what a chunk leaves of a group.
__device__ __forceinline__ Index part_of(int chunk, int group) {
  return (static_cast<Index>(blockIdx.y) * gridDim.x + chunk) * FL_G + group;
}
__device__ __forceinline__ float numbers_of(int chunk, Index positions) {
  return static_cast<float>(chunk_of(chunk, positions).count * kPerGroup);
}

#if FL_KIND == 0
//   FL_SAVES   1: mean and rstd are given
extern "C" __global__ void __launch_bounds__(kThreads, FL_BLOCKS) gn_stats(const T* x, float2* parts, Index positions) {
  fl_wait();
  // Of x less the chunk's first value of its channel, which is near: a large mean leaves the digits to what varies. Welford's recurrence
  // (Technometrics 4, 1962), so that a first value that is far costs no more than it has to.
  const Chunk chunk = chunk_of(blockIdx.x, positions);
  Own origin = {}, mean = {}, squares = {};
  if (chunk.count > 0) load_own(x + (blockIdx.y * positions + chunk.first) * FL_C, origin);
  float count = 0;
  each_position<Vectors, FL_VECS == 1 ? 4 : 2, false>(
      positions, [&](Vectors& held, Index at) { held.load(x + at); },
      [&](const Vectors& held, Index) {
        count += 1.f;
        const float share = 1.f / count;
#pragma unroll
        for (int i = 0; i < FL_VECS; ++i) {
          if (!has(i)) continue;
          float values[FL_VEC];
          unpack(held.at[i], values);
#pragma unroll
          for (int j = 0; j < FL_VEC; ++j) {
            const float value = values[j] - origin[i][j], apart = value - mean[i][j];
            mean[i][j] += apart * share;
            squares[i][j] += apart * (value - mean[i][j]);
          }
        }
      });
  const Moments* const channels = over_rows<Moments>(
      positions, [&](int i, int j) { return Moments{origin[i][j] + mean[i][j], squares[i][j]}; });
  const float each = static_cast<float>(chunk.count);
  over_groups<Moments>(
      kPerGroup, [&](int group, int k) { return channels[group * kPerGroup + k]; }, [&](int) { return each; },
      [&](int group, Moments found, float) { parts[part_of(blockIdx.x, group)] = {found.mean, found.squares}; });
}

extern "C" __global__ void __launch_bounds__(kThreads, FL_BLOCKS) gn_apply(
    const T* x, const Scale* scale, const Bias* bias, const float2* parts, T* out, float* means, float* rstds, Index positions,
    float epsilon) {
  fl_wait();
  __shared__ float shared_mean[FL_G], shared_rstd[FL_G];
  over_groups<Moments>(
      gridDim.x,
      [&](int group, int chunk) {
        const float2 part = parts[part_of(chunk, group)];
        return Moments{part.x, part.y};
      },
      [&](int chunk) { return numbers_of(chunk, positions); },
      [&](int group, Moments found, float count) {
        const float rstd = rsqrtf(found.squares / count + epsilon);
        shared_mean[group] = found.mean;
        shared_rstd[group] = rstd;
        if (FL_SAVES && blockIdx.x == 0) {
          const Index at = static_cast<Index>(blockIdx.y) * FL_G + group;
          means[at] = found.mean;
          rstds[at] = rstd;
        }
      });
  __syncthreads();
  Own mean = {}, factor = {}, shift = {};
  load_of_group(shared_mean, mean);
  load_factors(shared_rstd, scale, factor);
  if constexpr (FL_READS_BIAS) load_own(bias, shift);
  each_position<Vectors, FL_VECS == 1 ? 4 : 2, true>(
      positions, [&](Vectors& held, Index at) { held.load_last(x + at); },
      [&](const Vectors& held, Index at) {
#pragma unroll
        for (int i = 0; i < FL_VECS; ++i) {
          if (!has(i)) continue;
          float values[FL_VEC];
          unpack(held.at[i], values);
#pragma unroll
          for (int j = 0; j < FL_VEC; ++j) {
            const float h = (values[j] - mean[i][j]) * factor[i][j];
            values[j] = activation(FL_READS_BIAS ? h + shift[i][j] : h);
          }
          Pack<T> made;
          pack_into(made, values);
          made.store_past(out + at + column_of(i));
        }
      });
}
#endif

#if FL_KIND == 1
//   FL_WANT    bits: 1 dx, 2 dscale, 4 dbias
//   FL_SUM_HEIGHT  threads that share a channel of gn_grad_vectors
constexpr int kWant = FL_WANT;
// One at a time where a vector may lie in two groups: what it knows of them takes more registers.
constexpr int kAtOnce = FL_VECS == 1 ? 2 : 1, kAtOnceForX = kPerGroup % FL_VEC == 0 ? kAtOnce : 1;

struct Pair {
  Vectors ct, x;
};

// What a thread knows of its channels: h = (x - mean) factor + bias.
struct Channels {
  Own mean = {}, factor = {}, bias = {};

  __device__ __forceinline__ void load(const Scale* scales, const Bias* biases, const float* means, const float* rstds) {
    load_of_group(means, mean);
    load_factors(rstds, scales, factor);
    if constexpr (FL_READS_BIAS) load_own(biases, bias);
  }
  // The cotangent of h, of that of out.
  __device__ __forceinline__ float through_activation(int i, int j, float ct, float centred) const {
    if constexpr (FL_ACT == FL_NONE) return ct;
    const float h = centred * factor[i][j];
    return ct * slope(FL_READS_BIAS ? h + bias[i][j] : h);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, FL_BLOCKS) gn_grad_sums(
    const T* ct, const T* x, const Scale* scale, const Bias* bias, const float* means, const float* rstds, float2* parts,
    float* parts_scale, float* parts_bias, Index positions) {
  fl_wait();
  const Index groups = static_cast<Index>(blockIdx.y) * FL_G;
  Channels channels;
  channels.load(scale, bias, means + groups, rstds + groups);
  Own of_one = {}, of_centred = {};
  each_position<Pair, kAtOnce, false>(
      positions,
      [&](Pair& held, Index at) {
        held.ct.load(ct + at);
        held.x.load(x + at);
      },
      [&](const Pair& held, Index) {
#pragma unroll
        for (int i = 0; i < FL_VECS; ++i) {
          if (!has(i)) continue;
          float cts[FL_VEC], values[FL_VEC];
          unpack(held.ct.at[i], cts);
          unpack(held.x.at[i], values);
#pragma unroll
          for (int j = 0; j < FL_VEC; ++j) {
            const float centred = values[j] - channels.mean[i][j], u = channels.through_activation(i, j, cts[j], centred);
            of_one[i][j] += u;
            of_centred[i][j] += u * centred;
          }
        }
      });
  Own rstd = {};
  load_of_group(rstds + groups, rstd);
  const Sums* const sums =
      over_rows<Sums>(positions, [&](int i, int j) { return Sums{of_one[i][j], of_centred[i][j] * rstd[i][j]}; });
  if constexpr ((kWant & 6) != 0) {
    const Index start = (static_cast<Index>(blockIdx.y) * gridDim.x + blockIdx.x) * FL_C;
    for (int c = threadIdx.y * FL_LANES + threadIdx.x; c < FL_C; c += kThreads) {
      if (kWant & 2) parts_scale[start + c] = sums[c].second;
      if (kWant & 4) parts_bias[start + c] = sums[c].first;
    }
  }
  if constexpr ((kWant & 1) != 0) {
    over_groups<Sums>(
        kPerGroup,
        [&](int group, int k) {
          const int c = group * kPerGroup + k;
          const float factor = FL_READS_SCALE ? static_cast<float>(scale[c]) : 1.f;
          return Sums{sums[c].first * factor, sums[c].second * factor};
        },
        [](int) { return 1.f; },
        [&](int group, Sums found, float) { parts[part_of(blockIdx.x, group)] = {found.first, found.second}; });
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, FL_BLOCKS) gn_grad_x(
    const T* ct, const T* x, const Scale* scale, const Bias* bias, const float* means, const float* rstds, const float2* parts,
    T* dx, Index positions) {
  fl_wait();
  __shared__ float shared_one[FL_G], shared_centred[FL_G]; // dx = u factor - one - (x - mean) centred
  const Index groups = static_cast<Index>(blockIdx.y) * FL_G;
  const float of_group = 1.f / static_cast<float>(positions * kPerGroup);
  over_groups<Sums>(
      gridDim.x,
      [&](int group, int chunk) {
        const float2 part = parts[part_of(chunk, group)];
        return Sums{part.x, part.y};
      },
      [](int) { return 1.f; },
      [&](int group, Sums found, float) {
        const float rstd = rstds[groups + group];
        shared_one[group] = found.first * of_group * rstd;
        shared_centred[group] = found.second * of_group * rstd * rstd;
      });
  __syncthreads();
  Channels channels;
  channels.load(scale, bias, means + groups, rstds + groups);
  Own of_one = {}, of_centred = {};
  load_of_group(shared_one, of_one);
  load_of_group(shared_centred, of_centred);
  each_position<Pair, kAtOnceForX, true>(
      positions,
      [&](Pair& held, Index at) {
        held.ct.load_last(ct + at);
        held.x.load_last(x + at);
      },
      [&](const Pair& held, Index at) {
#pragma unroll
        for (int i = 0; i < FL_VECS; ++i) {
          if (!has(i)) continue;
          float cts[FL_VEC], values[FL_VEC];
          unpack(held.ct.at[i], cts);
          unpack(held.x.at[i], values);
#pragma unroll
          for (int j = 0; j < FL_VEC; ++j) {
            const float centred = values[j] - channels.mean[i][j], u = channels.through_activation(i, j, cts[j], centred);
            values[j] = u * channels.factor[i][j] - of_one[i][j] - centred * of_centred[i][j];
          }
          Pack<T> made;
          pack_into(made, values);
          made.store_past(dx + at + column_of(i));
        }
      });
}

extern "C" __global__ void __launch_bounds__(32 * FL_SUM_HEIGHT) gn_grad_vectors(
    const float* parts_scale, Scale* dscale, const float* parts_bias, Bias* dbias, int parts) {
  fl_wait();
  if constexpr ((kWant & 2) != 0) {
    if (blockIdx.y == 0) return sum_parts<FL_C, FL_SUM_HEIGHT>(parts_scale, dscale, parts);
  }
  if constexpr ((kWant & 4) != 0) sum_parts<FL_C, FL_SUM_HEIGHT>(parts_bias, dbias, parts);
}
#endif
