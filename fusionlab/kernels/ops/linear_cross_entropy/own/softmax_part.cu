// The softmax of `linear_cross_entropy`, of logits that exist: of each row h = scale * (logits + bias), capped to cap * tanh(h / cap) if there
// is a cap, the statistics and the loss, and the cotangent of the logits, from one read of them. The arithmetic is that of ../rows.py. A
// block has one row at a time and goes over it twice: first for the largest entry and the sum of the exponentials, online, as the entries
// arrive; then for the cotangent. A thread has the same entries both times, so that it keeps them where no other thread looks: some vectors
// in registers, more in shared memory, which asynchronous copies fill with the next row as soon as an entry is used for the last time; what
// has no room is read again, from the cache mostly. The kernel is bound by memory. Sums have a fixed order. The cotangent may take the place
// of the logits. part_plan.py chooses the geometry.
//
//   FL_T        storage of the logits: 0 float, 1 bfloat16, 2 half. All else is computed in float.
//   FL_BIAS     storage of the bias: the same codes; -1: without one
//   FL_OUT      storage of the cotangent: the same codes; -1: it is not wanted
//   FL_N        entries from one row to the next
//   FL_SIZE     how many of them there are for the loss, the first ones: the cotangent of the others is 0
//   FL_CLASSES  how many of these are logits: the others are `fill`, whatever they are in memory
//   FL_VEC      neighbours that a thread takes at once: 16 bytes. What a row has before its first aligned vector and behind its last
//               whole one, threads take one by one.
//   FL_THREADS  of a block: whole warps, a power of 2
//   FL_UNITS    vectors of a thread in a row
//   FL_HELD, FL_STAGED  how many of them are kept in registers, and behind those in shared memory
//   FL_BLOCKS   blocks that a multiprocessor is to have room for
//   FL_SCALED   1: scale is not 1
//   FL_CAPPED   1: there is a cap
//   FL_SMOOTH   1: label smoothing is not 0
//   FL_BEST     1: the number of the largest entry of each row is wanted
//   FL_OUTSIDE  what a label outside of [0, FL_SIZE) does: 0 "nan", 1 "clip", 2 "promise_in_bounds", 3 "zero", 4 "drop"
#include "../../packs.cuh"
#include "../../early.cuh"
#include "../../warp.cuh"
#ifdef __CUDACC__
__device__ __forceinline__ void copies_closed() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft> __device__ __forceinline__ void copies_left() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// copy_16 of what is read this once: the L2 cache gives it up first, and keeps what is read again.
__device__ __forceinline__ void copy_16_once(void* to, const void* from, bool inside) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 16 : 0), "l"(policy));
}
#else
#include <cluster_emulated.h>
#endif

using T = Storage<FL_T>::Type;
using Out = Storage<FL_OUT>::Type;
using Bias = Storage<FL_BIAS>::Type;
using Vector = Pack<T>;
constexpr bool kWants = FL_OUT >= 0, kTwice = kWants || FL_SMOOTH; // twice over the row
constexpr bool kBiased = FL_BIAS >= 0;
constexpr bool kAligned = FL_N % FL_VEC == 0;                       // every row starts at a vector
constexpr bool kPadded = FL_CLASSES < FL_N;                         // the last entries are no logits
constexpr int kLeast = kAligned ? FL_N / FL_VEC : FL_N < FL_VEC ? 0 : (FL_N - FL_VEC + 1) / FL_VEC; // vectors of a row, at least
constexpr int kFull = kLeast / FL_THREADS;                          // so many of them all threads have
constexpr int kWarps = FL_THREADS / 32;
constexpr int kBatch = 16 / FL_VEC; // vectors at a time: 16 entries, which share the exponential that the sum is rescaled by
constexpr int kKept = FL_HELD + FL_STAGED, kGroups = (FL_STAGED + kBatch - 1) / kBatch;
// Behind those that are kept: where whole batches of vectors that all threads have end.
constexpr int kWhole = kFull > kKept ? kKept + (kFull - kKept) / kBatch * kBatch : kKept;
constexpr float kLog2e = 1.44269504f;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity(); }
// What entries are subtracted from where the largest of them is `top`: no difference of two infinities where none is among the entries.
__device__ __forceinline__ float base_of(float top) { return top == -infinity() ? 0.f : top; }
__device__ __forceinline__ int unit_of(int i) { return i * FL_THREADS + static_cast<int>(threadIdx.x); }

// With an error of some units in the last place, more of them the smaller it is: of a sum of which the largest is 1, less than what adding
// makes; of a result in 16 bits, nothing.
__device__ __forceinline__ float rough_exp(float x) { return exp2_of(x * kLog2e); }

// So many groups of copies, or 7 if it is more, may still be on their way.
__device__ __forceinline__ void wait_until_left(int groups) {
  switch (groups) {
  case 0: copies_left<0>(); break;
  case 1: copies_left<1>(); break;
  case 2: copies_left<2>(); break;
  case 3: copies_left<3>(); break;
  case 4: copies_left<4>(); break;
  case 5: copies_left<5>(); break;
  case 6: copies_left<6>(); break;
  default: copies_left<7>();
  }
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// Where the vectors of a row are, and whose its other entries are.
struct Row {
  Index start;    // of its first entry, among all
  int head, body; // entries before the first vector, vectors
  Index mine;     // of this thread's first vector

  __device__ __forceinline__ explicit Row(Index row) : start(row * FL_N) {
    const int before = kAligned ? 0 : static_cast<int>((FL_VEC - start % FL_VEC) % FL_VEC);
    head = before < FL_N ? before : FL_N;
    body = kAligned ? FL_N / FL_VEC : (FL_N - head) / FL_VEC;
    mine = start + head + static_cast<int>(threadIdx.x) * FL_VEC;
  }
  __device__ __forceinline__ bool has(int i) const { return i < kFull || unit_of(i) < body; }
  // Of the first entry of vector number i, where some of its entries are no logits; else 0, which is before all of these. Of most vectors
  // the compiler knows.
  __device__ __forceinline__ int checked_column(int i) const {
    if (!kPadded || (i + 1) * (FL_THREADS * FL_VEC) + FL_VEC <= FL_CLASSES) return 0;
    const int first = column(i);
    return first + FL_VEC > FL_CLASSES ? first : 0;
  }
  __device__ __forceinline__ int column(int i) const { return head + unit_of(i) * FL_VEC; } // of the first entry of vector number i
  __device__ __forceinline__ Index at(int i) const { return mine + i * (FL_THREADS * FL_VEC); }
  // Of the entry that is a thread's alone, -1 for none.
  __device__ __forceinline__ int lone_column() const {
    if (kAligned) return -1;
    const int thread = threadIdx.x, column = thread < head ? thread : thread + body * FL_VEC;
    return column < FL_N && thread < 2 * FL_VEC ? column : -1;
  }
  // Whether an entry is in one of this thread's vectors.
  __device__ __forceinline__ bool is_mine(int column) const {
    const int unit = (column - head) / FL_VEC;
    return column >= head && unit < body && unit % FL_THREADS == static_cast<int>(threadIdx.x);
  }
};

// Whether a thread has vector number i of those before `end`, or kSure.
constexpr int kSure = -1;
__device__ __forceinline__ bool has(const Row& row, int i, int end) { return end == kSure || (i < end && row.has(i)); }

// What an entry is made of that of memory.
struct alignas(FL_VEC * sizeof(Bias)) Biases {
  Bias at[FL_VEC];
};
struct Reading {
  const Bias* bias;
  float scale, fill, cap, per_cap;

  __device__ __forceinline__ float of(float value, int column) const {
    return with_bias(kBiased ? value + static_cast<float>(bias[column]) : value, column);
  }
  __device__ __forceinline__ float with_bias(float value, int column) const {
    if (kPadded && column >= FL_CLASSES) return column < FL_SIZE ? fill : -infinity();
    const float scaled = FL_SCALED ? scale * value : value;
    return FL_CAPPED ? cap * tanhf(scaled * per_cap) : scaled;
  }
  // The same of the entries of a vector, of which the first is in this column.
  __device__ __forceinline__ void add_bias(float* values, int column) const {
    if constexpr (kBiased) {
      Biases biases;
      if constexpr (kAligned)
        biases = *reinterpret_cast<const Biases*>(bias + column);
      else {
#pragma unroll
        for (int k = 0; k < FL_VEC; ++k) biases.at[k] = bias[column + k];
      }
#pragma unroll
      for (int k = 0; k < FL_VEC; ++k) values[k] += static_cast<float>(biases.at[k]);
    }
  }
};

// The entries of a batch of vectors: -inf for those that a thread does not have.
struct Values {
  float at[kBatch][FL_VEC];

  __device__ __forceinline__ float operator[](int j) const { return at[j / FL_VEC][j % FL_VEC]; }
  // Of a thread's vectors from number i on, before number `end`: from(i) loads one.
  template <typename From> __device__ __forceinline__ void take(const Row& row, int i, int end, const Reading& reading, const From& from) {
    Vector vectors[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (has(row, i + j, end)) vectors[j] = from(i + j);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool there = has(row, i + j, end);
      if (there) {
        unpack(vectors[j], at[j]);
        reading.add_bias(at[j], row.column(i + j));
      }
      const int column = row.checked_column(i + j);
#pragma unroll
      for (int k = 0; k < FL_VEC; ++k) at[j][k] = there ? reading.with_bias(at[j][k], column + k) : -infinity();
    }
  }
};

// The vectors that a thread keeps of a row.
struct Kept {
  const T* logits;
  Vector held[FL_HELD > 0 ? FL_HELD : 1];
  Vector* staged; // the first one; the next is behind those of all other threads

  __device__ __forceinline__ Vector& in_shared(int i) const { return staged[(i - FL_HELD) * FL_THREADS]; }
  __device__ __forceinline__ void hold(const Row& row, int i) {
    if (row.has(i)) held[i].load_last(logits + row.at(i));
  }
  // As one group of copies.
  __device__ __forceinline__ void stage(const Row& row, int first) {
#pragma unroll
    for (int i = first; i < first + kBatch && i < kKept; ++i) {
      if (!row.has(i)) continue;
      if constexpr (kKept < FL_UNITS)
        copy_16_once(&in_shared(i), logits + row.at(i), true);
      else
        copy_16(&in_shared(i), logits + row.at(i), true);
    }
    copies_closed();
  }
  // Calls use(values, number of the first vector) for every batch of a row, as the copies arrive.
  template <typename Use> __device__ __forceinline__ void each_batch(const Row& row, const Reading& reading, const Use& use) const {
    Values values;
#pragma unroll
    for (int i = 0; i < FL_HELD; i += kBatch) {
      values.take(row, i, FL_HELD, reading, [&](int k) { return held[k]; });
      use(values, i);
    }
#pragma unroll
    for (int i = FL_HELD; i < kKept; i += kBatch) {
      wait_until_left(kGroups - 1 - (i - FL_HELD) / kBatch);
      values.take(row, i, kKept, reading, [&](int k) { return in_shared(k); });
      use(values, i);
    }
    const auto from_memory = [&](int k) {
      Vector vector;
      vector.load(logits + row.at(k));
      return vector;
    };
#pragma unroll 1
    for (int i = kKept; i < kWhole; i += kBatch) {
      values.take(row, i, kSure, reading, from_memory);
      use(values, i);
    }
#pragma unroll
    for (int i = kWhole; i < FL_UNITS; i += kBatch) {
      values.take(row, i, FL_UNITS, reading, from_memory);
      use(values, i);
    }
  }
};

// The largest entry of some, and the sum of exp(entry - largest). A NaN or an infinity among them makes the sum NaN.
struct Online {
  float top, mass;

  // Gives the largest of the values.
  __device__ __forceinline__ float add(const Values& values) {
    float here = -infinity();
#pragma unroll
    for (int j = 0; j < kBatch * FL_VEC; ++j) here = fmaxf(here, values[j]);
    const float most = fmaxf(top, here);
    const float base = base_of(most);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kBatch * FL_VEC; ++j) sum += rough_exp(values[j] - base);
    mass = mass * rough_exp(top - base) + sum;
    top = most;
    return here;
  }
  __device__ __forceinline__ void over_warp() {
    const float most = warp_max(top);
    mass = warp_sum(mass * expf(top - base_of(most)));
    top = most;
  }
};

// The first of the largest entries of some; column 0 where none is above -inf.
struct Best {
  float top = -infinity();
  int column = kNone;
  static constexpr int kNone = 0x7fffffff;

  __device__ __forceinline__ void meet(float other, int number) {
    if (other > top || (other == top && number < column)) top = other, column = number;
  }
  // Of a thread's vectors from number i on, the largest of whose entries is `here`: columns behind those that it had before.
  __device__ __forceinline__ void add(const Row& row, const Values& values, int i, float here) {
    if (!(here > top)) return;
    top = here;
    int at = 0;
#pragma unroll
    for (int j = kBatch * FL_VEC - 1; j >= 0; --j) at = values[j] == here ? j : at;
    column = row.column(i + at / FL_VEC) + at % FL_VEC;
  }
  // The first NaN, as an entry of size 1 among some of size 0.
  __device__ __forceinline__ void add_nan(const Row& row, const Values& values, int i) {
#pragma unroll
    for (int j = 0; j < kBatch * FL_VEC; ++j) {
      if (values[j] != values[j]) meet(1, row.column(i + j / FL_VEC) + j % FL_VEC);
    }
  }
  __device__ __forceinline__ void over_warp() {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      const float its = __shfl_xor_sync(~0u, top, other);
      meet(its, __shfl_xor_sync(~0u, column, other));
    }
  }
};

// Over the threads of a block, in each of them. Calls take turns with two places in shared memory, so that one barrier is enough.
struct OverBlock {
  int turn = 0;

  __device__ __forceinline__ Online shown(Online mine) { // the part of one warp in each lane
    __shared__ float parts[2][kWarps][2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) parts[turn][warp][0] = mine.top, parts[turn][warp][1] = mine.mass;
    __syncthreads();
    mine.top = lane < kWarps ? parts[turn][lane % kWarps][0] : -infinity();
    mine.mass = lane < kWarps ? parts[turn][lane % kWarps][1] : 0.f;
    turn ^= 1;
    return mine;
  }
  __device__ __forceinline__ void all(Online& found) {
    found.over_warp();
    found = shown(found);
    found.over_warp();
  }
  __device__ __forceinline__ float sum(float x) { return warp_sum(shown({0.f, warp_sum(x)}).mass); }
  __device__ __forceinline__ void all(Best& best) {
    best.over_warp();
    const Online parts = shown({best.top, __uint_as_float(best.column)});
    best.top = parts.top, best.column = static_cast<int>(__float_as_uint(parts.mass));
    best.over_warp();
  }
};

// What the cotangent of an entry is made of: exp(entry - top) * of_p - of_all, and less of_label for that of the label.
struct Cotangent {
  float top, of_p, of_all, of_label, per_cap;

  __device__ __forceinline__ float of(float value) const {
    const float p = (sizeof(Out) == 2 ? rough_exp(value - top) : expf(value - top)) * of_p;
    return through_cap(value, FL_SMOOTH ? p - of_all : p);
  }
  __device__ __forceinline__ float of_the_label(float value) const { return of(value) - through_cap(value, of_label); }
  __device__ __forceinline__ float through_cap(float value, float cotangent) const {
    const float tanh = FL_CAPPED ? value * per_cap : 0.f;
    return FL_CAPPED ? cotangent * (1 - tanh * tanh) : cotangent;
  }
};

// kept = 1 - smoothing, share = smoothing / FL_SIZE
extern "C" __global__ void __launch_bounds__(FL_THREADS, FL_BLOCKS) softmax_part(
    const T* logits, const int* labels, const float* of_loss, const Bias* bias, Out* cotangents, float* tops, float* masses, float* losses, float* lses,
    int* bests, Index rows, float scale, float smoothing, float kept, float share, float z_loss, float fill, float cap, float per_cap) {
  fl_wait();
  Kept own;
  own.logits = logits;
  own.staged = reinterpret_cast<Vector*>(shared_memory) + threadIdx.x;
  OverBlock over_block;
  if (blockIdx.x < rows) {
    const Row first(blockIdx.x);
#pragma unroll
    for (int i = 0; i < FL_HELD; ++i) own.hold(first, i);
#pragma unroll
    for (int i = FL_HELD; i < kKept; i += kBatch) own.stage(first, i);
  }
  const Reading reading{bias, scale, fill, cap, per_cap};

  for (Index number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row(number);
    const bool is_last = number + gridDim.x >= rows;
    const Row next(number + gridDim.x);
    const int label = labels[number], lone = row.lone_column();
    const float of_row = kWants ? of_loss[number] : 0.f;
    const bool inside = label >= 0 && label < FL_SIZE;
    const int nearest = label < 0 ? 0 : label < FL_SIZE ? label : FL_SIZE - 1;
    const float of_picked = reading.of(static_cast<float>(logits[row.start + nearest]), nearest); // before another takes its place
    const float alone = lone < 0 ? -infinity() : reading.of(static_cast<float>(logits[row.start + lone]), lone);

    Online found = {alone, lone < 0 ? 0.f : expf(alone - base_of(alone))};
    Best best;
    own.each_batch(row, reading, [&](const Values& values, int i) {
      const float here = found.add(values);
      if (FL_BEST) best.add(row, values, i, here);
    });
    over_block.all(found);
    if (FL_BEST) {
      if (alone > -infinity()) best.meet(alone, lone); // of a row of -inf alone none, as of vectors: column 0
      over_block.all(best);
    }
    float top = found.top, mass = found.mass;
    if (!is_finite(top) || !is_finite(mass)) { // no entry is finite, or the sum has a NaN or an infinity: as of entries below 0
      top = 0;
      float sum = lone < 0 ? 0.f : expf(alone);
      Best nan = {0};
      if (FL_BEST && alone != alone) nan.meet(1, lone);
      own.each_batch(row, reading, [&](const Values& values, int i) {
#pragma unroll
        for (int j = 0; j < kBatch * FL_VEC; ++j) sum += expf(values[j]);
        if (FL_BEST) nan.add_nan(row, values, i);
      });
      mass = over_block.sum(sum);
      if (FL_BEST) {
        over_block.all(nan);
        if (nan.top > 0) best = nan;
      }
    }
    const float log_mass = logf(mass), lse = top + log_mass;

    float total = lone < 0 || (kPadded && lone >= FL_SIZE) ? 0.f : alone - top; // of entries less top
    if constexpr (kTwice) {
      float count = z_loss != 0 ? 1 + 2 * z_loss * lse : 1; // the derivative of the loss by lse
      if (FL_OUTSIDE == 4 && !inside) count -= kept;
      const Cotangent cotangent{top, scale * of_row * count / mass, scale * of_row * share, scale * of_row * kept, per_cap};
      const auto give = [&](const Values& values, int first, int end) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int i = first + j;
          if (!has(row, i, end)) continue;
          const int column = row.checked_column(i);
          if constexpr (FL_SMOOTH) {
#pragma unroll
            for (int k = 0; k < FL_VEC; ++k) total += kPadded && column + k >= FL_SIZE ? 0.f : values.at[j][k] - top;
          }
          if constexpr (kWants) {
            float made[FL_VEC];
#pragma unroll
            for (int k = 0; k < FL_VEC; ++k) made[k] = kPadded && column + k >= FL_CLASSES ? 0.f : cotangent.of(values.at[j][k]);
            Pack<Out> pack;
            pack_into(pack, made);
            if constexpr (kKept < FL_UNITS)
              pack.store_past(cotangents + row.at(i));
            else
              pack.store(cotangents + row.at(i));
          }
        }
      };
      Values values;
      // First what was read last, which the cache is likely to have.
      const auto from_memory = [&](int k) {
        Vector vector;
        vector.load_last(logits + row.at(k));
        return vector;
      };
#pragma unroll
      for (int i = kWhole; i < FL_UNITS; i += kBatch) {
        values.take(row, i, FL_UNITS, reading, from_memory);
        give(values, i, FL_UNITS);
      }
#pragma unroll 1
      for (int i = kWhole - kBatch; i >= kKept; i -= kBatch) {
        values.take(row, i, kSure, reading, from_memory);
        give(values, i, kSure);
      }
#pragma unroll
      for (int i = FL_HELD; i < kKept; i += kBatch) {
        values.take(row, i, kKept, reading, [&](int k) { return own.in_shared(k); });
        give(values, i, kKept);
        if (!is_last) own.stage(next, i);
      }
#pragma unroll
      for (int i = 0; i < FL_HELD; i += kBatch) {
        values.take(row, i, FL_HELD, reading, [&](int k) { return own.held[k]; });
        give(values, i, FL_HELD);
#pragma unroll
        for (int k = i; k < i + kBatch && k < FL_HELD; ++k) {
          if (!is_last) own.hold(next, k);
        }
      }
      if constexpr (kWants) {
        if (lone >= 0) cotangents[row.start + lone] = static_cast<Out>(kPadded && lone >= FL_CLASSES ? 0.f : cotangent.of(alone));
        // Of the label, by the thread that wrote it: in order.
        const bool has_gradient = (FL_OUTSIDE == 1 || inside) && (!kPadded || nearest < FL_CLASSES);
        if (has_gradient && (lone == nearest || row.is_mine(nearest)))
          cotangents[row.start + nearest] = static_cast<Out>(cotangent.of_the_label(of_picked));
      }
      if (FL_SMOOTH) total = over_block.sum(total);
    }
    if (threadIdx.x == 0) {
      float picked = of_picked - top;
      if (FL_OUTSIDE == 0 && !inside) picked = __uint_as_float(0x7fffffffu);
      if (FL_OUTSIDE == 3 && !inside) picked = -top;
      float loss = log_mass - kept * picked;
      if (FL_OUTSIDE == 4 && !inside) loss = smoothing * log_mass;
      if (FL_SMOOTH) loss -= share * total;
      if (z_loss != 0) loss += z_loss * lse * lse;
      tops[number] = top;
      masses[number] = mass;
      losses[number] = loss;
      lses[number] = lse;
      if (FL_BEST) bests[number] = best.column == Best::kNone ? 0 : best.column;
    }
  }
}
