// out = x + w (y - x), arrays of one rank that broadcast against each other (lerp_forward), and its gradients: in one pass over the cotangent
// where none is a sum (lerp_backward_flat), else tile by tile (lerp_backward, and lerp_sum for sums of more than one tile). All are bound
// by memory. plan.py chooses the geometry and gives it as macros, so that every division is by a constant and what is not there costs
// nothing: as with XLA's own kernels, another shape is another compile.
//
//   FL_KIND   0 lerp_forward, 1 lerp_backward_flat, 2 lerp_backward and lerp_sum
//   FL_T      storage: 0 float, 1 bfloat16, 2 half, 3 double. Arithmetic and sums are in float, for double in double.
//   FL_WIDE   1: 64-bit element numbers
//   FL_VEC    neighbours along the last axis that a thread takes at once, up to 16 bytes
//   FL_LANES  a bit for each array (numbered as below) that goes on along the last axis; the others have one element there
//   FL_WANT   of the backward kernels, a bit for each gradient: 1 dx, 2 dy, 4 dw
//
// Axes are lists of {size, {what one step adds to the place in each array}}, slowest first. What follows FL_KIND 2 is with its kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../early.cuh"

#if !defined(FL_KIND) || !defined(FL_T) || !defined(FL_WIDE) || !defined(FL_VEC) || !defined(FL_LANES)
#error "FL_KIND, FL_T, FL_WIDE, FL_VEC and FL_LANES must be defined"
#endif

#if FL_WIDE
using Index = unsigned long long;
#else
using Index = unsigned; // to 2^31 - 1 elements: what lies a block beyond the end still has a number
#endif
#if FL_T == 0
using T = float;
#elif FL_T == 1
using T = __nv_bfloat16;
using Pair = __nv_bfloat162;
#elif FL_T == 2
using T = __half;
using Pair = __half2;
#else
using T = double;
#endif
#if FL_T == 3
using C = double; // of the arithmetic, and of the sums
#else
using C = float;
#endif
#if FL_KIND == 2
constexpr int kThreads = FL_TX * FL_TY; // of a block
#else
constexpr int kThreads = 256;
#endif

// The arrays, and what else depends on the place: the element's number along the last axis, the first p and q of the block's tile.
enum { kFull, kW, kX, kY, kDx, kDy, kDw, kColumn, kFirstP, kFirstQ, kPlaces };

struct Place {
  Index at[kPlaces];
};
struct Axis {
  Index size;
  Index step[kPlaces];
};

// The place of an element, or of a row of them, by its number in the product of axes.
template <int kCount> __device__ __forceinline__ Place place_of(Index number, const Axis (&axes)[kCount]) {
  Place place = {};
#pragma unroll
  for (int a = kCount - 1; a >= 0; --a) {
    const Index rest = a ? number / axes[a].size : 0;
    const Index i = number - rest * axes[a].size;
    number = rest;
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) place.at[k] += i * axes[a].step[k];
  }
  return place;
}

__device__ __forceinline__ Place operator+(Place a, const Place& b) {
#pragma unroll
  for (int k = 0; k < kPlaces; ++k) a.at[k] += b.at[k];
  return a;
}

__device__ constexpr bool has_lanes(int array) { return FL_LANES >> array & 1; }

template <int kBytes> struct RawOf;
template <> struct RawOf<2> { using Type = unsigned short; };
template <> struct RawOf<4> { using Type = unsigned int; };
template <> struct RawOf<8> { using Type = unsigned long long; };
template <> struct RawOf<16> { using Type = uint4; };

// Neighbours along the last axis, moved by one instruction.
template <int kCount> struct Pack {
  typename RawOf<sizeof(T) * kCount>::Type raw;
  template <typename F = T> __device__ __forceinline__ F& at(int i) { return reinterpret_cast<F*>(&raw)[i]; }
  template <typename F = T> __device__ __forceinline__ const F& at(int i) const {
    return reinterpret_cast<const F*>(&raw)[i];
  }
};

__device__ __forceinline__ void unpack(const Pack<FL_VEC>& pack, C (&to)[FL_VEC]) {
#if (FL_T == 1 || FL_T == 2) && FL_VEC > 1
#pragma unroll
  for (int i = 0; i < FL_VEC / 2; ++i) {
#if FL_T == 1
    const float2 both = __bfloat1622float2(pack.at<Pair>(i));
#else
    const float2 both = __half22float2(pack.at<Pair>(i));
#endif
    to[2 * i] = both.x;
    to[2 * i + 1] = both.y;
  }
#else
#pragma unroll
  for (int i = 0; i < FL_VEC; ++i) to[i] = static_cast<C>(pack.at(i));
#endif
}

__device__ __forceinline__ Pack<FL_VEC> packed(const C (&from)[FL_VEC]) {
  Pack<FL_VEC> pack;
#if (FL_T == 1 || FL_T == 2) && FL_VEC > 1
#pragma unroll
  for (int i = 0; i < FL_VEC / 2; ++i) {
#if FL_T == 1
    pack.at<Pair>(i) = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
#else
    pack.at<Pair>(i) = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
#endif
  }
#else
#pragma unroll
  for (int i = 0; i < FL_VEC; ++i) pack.at(i) = static_cast<T>(from[i]);
#endif
  return pack;
}

__device__ __forceinline__ void store(T* to, const C (&values)[FL_VEC]) {
  const auto pack = packed(values);
  *reinterpret_cast<decltype(Pack<FL_VEC>::raw)*>(to) = pack.raw;
}

// What a thread reads of an array for FL_VEC neighbours of the result: as many, or the one that belongs to all of them.
template <int kArray> struct Held {
  static constexpr int kCount = has_lanes(kArray) ? FL_VEC : 1;
  Pack<kCount> pack = {};

  __device__ __forceinline__ void load(const T* from, const Place& place) {
    pack.raw = *reinterpret_cast<const decltype(pack.raw)*>(from + place.at[kArray]);
  }
  // Of what nothing reads again: it leaves the cache first, which has more room for what is written.
  __device__ __forceinline__ void load_last(const T* from, const Place& place) {
    pack.raw = __ldcs(reinterpret_cast<const decltype(pack.raw)*>(from + place.at[kArray]));
  }
  __device__ __forceinline__ void values(C (&to)[FL_VEC]) const {
    if constexpr (kCount == FL_VEC) {
      unpack(pack, to);
    } else {
      const C one = static_cast<C>(pack.at(0));
#pragma unroll
      for (int i = 0; i < FL_VEC; ++i) to[i] = one;
    }
  }
};

#if FL_KIND < 2
// Element by element. FL_AXES are the axes of the result, the last one in steps of FL_VEC; FL_UNITS is their product, FL_ITEMS how many of
// them a thread takes, and FL_W_ONE 1 where w has one element, which then stays in a register.
__device__ __forceinline__ Index unit_of(int item) {
  return (static_cast<Index>(blockIdx.x) * FL_ITEMS + item) * kThreads + threadIdx.x;
}
#endif

#if FL_KIND == 0
extern "C" __global__ void __launch_bounds__(kThreads) lerp_forward(const T* x, const T* y, const T* w, T* out) {
  fl_wait();
  constexpr Axis axes[] = {FL_AXES};
  Held<kX> held_x[FL_ITEMS];
  Held<kY> held_y[FL_ITEMS];
  Held<kW> held_w[FL_W_ONE ? 1 : FL_ITEMS];
  if (FL_W_ONE) held_w[0].load(w, {});
#pragma unroll
  for (int i = 0; i < FL_ITEMS; ++i) {
    if (unit_of(i) >= FL_UNITS) break;
    const Place place = place_of(unit_of(i), axes);
    held_x[i].load(x, place);
    held_y[i].load(y, place);
    if (!FL_W_ONE) held_w[i].load(w, place);
  }
#pragma unroll
  for (int i = 0; i < FL_ITEMS; ++i) {
    if (unit_of(i) >= FL_UNITS) break;
    C xs[FL_VEC], ys[FL_VEC], ws[FL_VEC];
    held_x[i].values(xs);
    held_y[i].values(ys);
    held_w[FL_W_ONE ? 0 : i].values(ws);
#pragma unroll
    for (int j = 0; j < FL_VEC; ++j) xs[j] += ws[j] * (ys[j] - xs[j]);
    store(out + unit_of(i) * FL_VEC, xs);
  }
}
#endif

#if FL_KIND > 0
// The terms of the gradients at FL_VEC neighbours.
struct Terms {
  C dx[FL_VEC], dy[FL_VEC], dw[FL_VEC];
};

// What they are made of. Where nothing is loaded it is 0, and so are the terms.
struct Given {
  Held<kFull> ct;
  Held<kW> w;
  Held<kX> x;
  Held<kY> y;

  // Without an element there w is 0 too: 0 times an infinite one would be no 0.
  __device__ __forceinline__ Terms terms(const Held<kW>& held_w, bool inside) const {
    Terms made;
    C cts[FL_VEC];
    ct.values(cts);
    if constexpr ((FL_WANT & 3) != 0) {
      C ws[FL_VEC];
      held_w.values(ws);
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) {
        const C one_w = inside ? ws[j] : C(0);
        made.dx[j] = (C(1) - one_w) * cts[j];
        made.dy[j] = one_w * cts[j];
      }
    }
    if constexpr ((FL_WANT & 4) != 0) {
      C xs[FL_VEC], ys[FL_VEC];
      x.values(xs);
      y.values(ys);
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) made.dw[j] = cts[j] * (ys[j] - xs[j]);
    }
    return made;
  }
};
#endif

#if FL_KIND == 1
extern "C" __global__ void __launch_bounds__(kThreads) lerp_backward_flat(
    const T* ct, const T* w, const T* x, const T* y, T* dx, T* dy, T* dw) {
  fl_wait();
  constexpr Axis axes[] = {FL_AXES};
  Given given[FL_ITEMS];
  Held<kW> one;
  if (FL_W_ONE && (FL_WANT & 3)) one.load(w, {});
#pragma unroll
  for (int i = 0; i < FL_ITEMS; ++i) {
    if (unit_of(i) >= FL_UNITS) break;
    const Place place = place_of(unit_of(i), axes);
    given[i].ct.load_last(ct, place);
    if (!FL_W_ONE && (FL_WANT & 3)) given[i].w.load(w, place);
    if (FL_WANT & 4) given[i].x.load(x, place), given[i].y.load(y, place);
  }
#pragma unroll
  for (int i = 0; i < FL_ITEMS; ++i) {
    if (unit_of(i) >= FL_UNITS) break;
    const Terms terms = given[i].terms(FL_W_ONE ? one : given[i].w, true);
    const Index element = unit_of(i) * FL_VEC;
    if (FL_WANT & 1) store(dx + element, terms.dx);
    if (FL_WANT & 2) store(dy + element, terms.dy);
    if (FL_WANT & 4) store(dw + element, terms.dw);
  }
}
#endif

#if FL_KIND == 2
// The axes are dealt out to three: "grid" (a block has one place there), "p" and "q"; a tile is a range of p, a range of q and, along the last
// axis, FL_VEC elements of each of FL_TX lanes. What is left of the last axis is an axis like the others.
//   FL_TX, FL_TY       threads of a block along x (the last axis) and y: powers of 2 of product 32 to 256; FL_TX to 32, so that
//                      lanes of one place lie in one warp
//   FL_GRID, FL_P, FL_Q  the axes; those of the grid begin with the tiles along q and p
//   FL_P_SIZE, FL_Q_SIZE, FL_COLUMNS  of p, of q and of the last axis
//   FL_Q_SPAN          q of a tile. Its p are FL_TY FL_ROWS_P if FL_SPLITS_P is 1: threads along y take different p; else they take
//                      different q, and p has size 1.
//   FL_ROWS_P, FL_ROWS_Q  rows a thread has in flight: the loads of FL_ROWS_P FL_ROWS_Q places come before their use
//   FL_STAGE           of those steps along q between two barriers, where sums over p are passed on through shared memory
//   FL_DX, FL_DY, FL_DW  bits: 1 wanted, 2 a sum over p, 4 over q, 8 over the last axis, 16 what a tile makes is partial: its places are
//                      those in scratch memory of C, [parts][elements of the gradient], which lerp_sum adds up
//   FL_W_STAYS         1: w is the same for all p and q
constexpr int kStep = FL_SPLITS_P ? FL_ROWS_Q : FL_ROWS_Q * FL_TY; // q of all threads at once
constexpr int kSlots = FL_STAGE * FL_ROWS_Q;                       // q between two barriers

// The sum over the lanes of one place, in each of them; or over a warp.
__device__ __forceinline__ C lane_sum(C value, int lanes) {
#pragma unroll
  for (int other = 1; other < lanes; other *= 2) value += __shfl_xor_sync(~0u, value, other);
  return value;
}

__device__ __forceinline__ int thread_of_block() { return threadIdx.y * FL_TX + threadIdx.x; }

__device__ __forceinline__ bool in_columns(const Place& place, Index column) {
  return FL_COLUMNS % (FL_TX * FL_VEC) == 0 || place.at[kColumn] + column < FL_COLUMNS;
}

// Neighbouring sums, by instructions of up to 16 bytes: as a row holds a whole number of vectors, each is aligned to its size.
template <int kCount> __device__ __forceinline__ void store_sums(C* to, const C (&values)[kCount]) {
  constexpr int kSixteen = 16 / sizeof(C), kWide = kCount < kSixteen ? kCount : kSixteen;
  struct alignas(kWide * sizeof(C)) Chunk {
    C at[kWide];
  };
#pragma unroll
  for (int i = 0; i < kCount; i += kWide) {
    Chunk chunk;
#pragma unroll
    for (int j = 0; j < kWide; ++j) chunk.at[j] = values[i + j];
    *reinterpret_cast<Chunk*>(to + i) = chunk;
  }
}

// One gradient: what a thread has summed of it, and where that goes.
template <int kBits, int kArray> struct Gradient {
  static constexpr bool kWanted = kBits & 1, kOverP = kBits & 2, kOverQ = kBits & 4, kOverLanes = kBits & 8;
  static constexpr bool kPartial = kBits & 16;
  static constexpr bool kPassedOn = kWanted && kOverP && !kOverQ; // a sum over p for each q: of all threads along y
  static constexpr int kRows = kOverQ && !kOverP ? FL_ROWS_P : 1;
  static constexpr int kValues = kOverLanes ? 1 : FL_VEC;
  static constexpr int kWords = kPassedOn ? kThreads * kValues * kSlots : 0; // of shared memory, twice
  C sum[kRows][kValues] = {};

  __device__ __forceinline__ static void add(C (&to)[kValues], const C (&terms)[FL_VEC]) {
#pragma unroll
    for (int j = 0; j < FL_VEC; ++j) to[kOverLanes ? 0 : j] += terms[j];
  }

  __device__ __forceinline__ static void put_one(void* to, Index at, C value) {
    if constexpr (kPartial) {
      static_cast<C*>(to)[at] = value;
    } else {
      static_cast<T*>(to)[at] = static_cast<T>(value);
    }
  }

  // What belongs to a place, of the FL_TX threads there.
  __device__ __forceinline__ static void put(void* to, const Place& place, const C (&values)[kValues], bool inside) {
    if constexpr (kOverLanes) {
      const C total = lane_sum(values[0], FL_TX);
      if (inside && threadIdx.x == 0) put_one(to, place.at[kArray], total);
    } else if (inside) {
      const Index at = place.at[kArray] + threadIdx.x * FL_VEC;
      if constexpr (kPartial) {
        store_sums(static_cast<C*>(to) + at, values);
      } else {
        store(static_cast<T*>(to) + at, values);
      }
    }
  }

  // The terms of a thread's i-th p; those of all its p for one q come one after another.
  __device__ __forceinline__ void take(void* to, const Place& place, int i, const C (&terms)[FL_VEC], bool inside) {
    if constexpr (!kWanted) {
    } else if constexpr (kOverP || kOverQ) {
      add(sum[kRows == 1 ? 0 : i], terms);
    } else {
      C values[kValues] = {};
      add(values, terms);
      put(to, place, values, inside);
    }
  }

  // After all p of one q.
  __device__ __forceinline__ void pass_on(C* shared, int slot) {
    if constexpr (kPassedOn) {
      store_sums(shared + (slot * kThreads + thread_of_block()) * kValues, sum[0]);
#pragma unroll
      for (int j = 0; j < kValues; ++j) sum[0][j] = 0;
    }
  }

  // What all threads passed on, after a barrier.
  template <int kCount>
  __device__ __forceinline__ static void collect(
      void* to, const C* shared, const Place& base, Index first, Index end, const Axis (&q_axes)[kCount]) {
    if constexpr (kPassedOn && kOverLanes) {
      for (int slot = thread_of_block() / 32; slot < kSlots; slot += kThreads / 32) {
        C total = 0;
#pragma unroll
        for (int i = 0; i < kThreads / 32; ++i) total += shared[slot * kThreads + i * 32 + thread_of_block() % 32];
        total = lane_sum(total, 32);
        if (first + slot < end && thread_of_block() % 32 == 0)
          put_one(to, (base + place_of(first + slot, q_axes)).at[kArray], total);
      }
    } else if constexpr (kPassedOn) {
      constexpr int kAcross = FL_TX * FL_VEC;
      for (int i = thread_of_block(); i < kSlots * kAcross; i += kThreads) {
        const int slot = i / kAcross, column = i % kAcross;
        if (first + slot >= end) continue;
        const Place place = base + place_of(first + slot, q_axes);
        C total = 0;
#pragma unroll
        for (int y = 0; y < FL_TY; ++y) total += shared[slot * kThreads * FL_VEC + y * kAcross + column];
        if (in_columns(place, column)) put_one(to, place.at[kArray] + column, total);
      }
    }
  }

  // Sums over q, at the end of the tile; over threads along y too where these took different terms of one sum.
  __device__ __forceinline__ void finish(
      void* to, C* shared, const Place& base, const Place (&at_p)[FL_ROWS_P], const bool (&has_p)[FL_ROWS_P]) {
    if constexpr (!kWanted || !kOverQ) {
    } else if constexpr (FL_SPLITS_P && !kOverP) {
#pragma unroll
      for (int i = 0; i < FL_ROWS_P; ++i) {
        const Place place = base + at_p[i];
        put(to, place, sum[i], has_p[i] && in_columns(place, threadIdx.x * FL_VEC));
      }
    } else if constexpr (kOverLanes) {
      const C of_warp = lane_sum(sum[0][0], 32);
      __syncthreads(); // shared memory is free
      if (thread_of_block() % 32 == 0) shared[thread_of_block() / 32] = of_warp;
      __syncthreads();
      if (thread_of_block() == 0) {
        C total = 0;
#pragma unroll
        for (int i = 0; i < kThreads / 32; ++i) total += shared[i];
        put_one(to, base.at[kArray], total);
      }
    } else {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kValues; ++j) shared[j * kThreads + thread_of_block()] = sum[0][j];
#pragma unroll
      for (int half = FL_TY / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half) {
#pragma unroll
          for (int j = 0; j < kValues; ++j)
            shared[j * kThreads + thread_of_block()] += shared[j * kThreads + thread_of_block() + half * FL_TX];
        }
      }
      if (threadIdx.y > 0) return;
      // The last addition to each was its thread's own. p is summed over or of size 1: any of its places will do.
      const Place place = base + at_p[0];
      C values[kValues];
#pragma unroll
      for (int j = 0; j < kValues; ++j) values[j] = shared[j * kThreads + thread_of_block()];
      put(to, place, values, in_columns(place, threadIdx.x * FL_VEC));
    }
  }
};

// Three blocks of 256 threads may have 85 registers each: enough for the loads in flight. Left to choose, the compiler took as few as 48
// once, and put some values into memory.
extern "C" __global__ void __launch_bounds__(kThreads, 3) lerp_backward(
    const T* ct, const T* w, const T* x, const T* y, void* dx, void* dy, void* dw) {
  fl_wait();
  constexpr Axis grid_axes[] = {FL_GRID};
  constexpr Axis p_axes[] = {FL_P};
  constexpr Axis q_axes[] = {FL_Q};
  Gradient<FL_DX, kDx> of_x;
  Gradient<FL_DY, kDy> of_y;
  Gradient<FL_DW, kDw> of_w;
  constexpr int kPassed = of_x.kWords + of_y.kWords + of_w.kWords;
  __align__(16) __shared__ C shared[2 * kPassed > kThreads * FL_VEC ? 2 * kPassed : kThreads * FL_VEC];

  const Place base = place_of(blockIdx.x, grid_axes);
  const Index column = threadIdx.x * FL_VEC;
  Place lanes = {};
#pragma unroll
  for (int k = kFull; k <= kY; ++k) lanes.at[k] = has_lanes(k) ? column : 0;

  Place at_p[FL_ROWS_P];
  bool has_p[FL_ROWS_P];
#pragma unroll
  for (int i = 0; i < FL_ROWS_P; ++i) {
    const Index p = FL_SPLITS_P ? base.at[kFirstP] + i * FL_TY + threadIdx.y : 0;
    has_p[i] = p < FL_P_SIZE;
    at_p[i] = place_of(has_p[i] ? p : 0, p_axes);
  }
  const Index end = base.at[kFirstQ] + FL_Q_SPAN < FL_Q_SIZE ? base.at[kFirstQ] + FL_Q_SPAN : FL_Q_SIZE;

  Held<kW> staying;
  if (FL_W_STAYS && (FL_WANT & 3) && in_columns(base, column)) staying.load(w, base + lanes);

  int turn = 0; // shared memory is used in halves: one is written while the other may still be read
  for (Index first = base.at[kFirstQ]; first < end; first += FL_STAGE * kStep) {
#pragma unroll 1
    for (int stage = 0; stage < FL_STAGE; ++stage) {
      Given given[FL_ROWS_Q][FL_ROWS_P];
      Place at_q[FL_ROWS_Q];
      bool inside[FL_ROWS_Q][FL_ROWS_P];
#pragma unroll
      for (int j = 0; j < FL_ROWS_Q; ++j) {
        const Index q = first + stage * kStep + (FL_SPLITS_P ? j : j * FL_TY + threadIdx.y);
        at_q[j] = base + place_of(q < end ? q : 0, q_axes);
#pragma unroll
        for (int i = 0; i < FL_ROWS_P; ++i) {
          const Place place = at_q[j] + at_p[i];
          inside[j][i] = q < end && has_p[i] && in_columns(place, column);
          if (!inside[j][i]) continue;
          given[j][i].ct.load(ct, place + lanes);
          if (!FL_W_STAYS && (FL_WANT & 3)) given[j][i].w.load(w, place + lanes);
          if (FL_WANT & 4) given[j][i].x.load(x, place + lanes), given[j][i].y.load(y, place + lanes);
        }
      }
#pragma unroll
      for (int j = 0; j < FL_ROWS_Q; ++j) {
#pragma unroll
        for (int i = 0; i < FL_ROWS_P; ++i) {
          const Terms terms = given[j][i].terms(FL_W_STAYS ? staying : given[j][i].w, !FL_W_STAYS || inside[j][i]);
          const Place place = at_q[j] + at_p[i];
          of_x.take(dx, place, i, terms.dx, inside[j][i]);
          of_y.take(dy, place, i, terms.dy, inside[j][i]);
          of_w.take(dw, place, i, terms.dw, inside[j][i]);
        }
        C* const half = shared + turn * kPassed;
        of_x.pass_on(half, stage * FL_ROWS_Q + j);
        of_y.pass_on(half + of_x.kWords, stage * FL_ROWS_Q + j);
        of_w.pass_on(half + of_x.kWords + of_y.kWords, stage * FL_ROWS_Q + j);
      }
    }
    if constexpr (kPassed > 0) {
      __syncthreads();
      const C* const half = shared + turn * kPassed;
      of_x.collect(dx, half, base, first, end, q_axes);
      of_y.collect(dy, half + of_x.kWords, base, first, end, q_axes);
      of_w.collect(dw, half + of_x.kWords + of_y.kWords, base, first, end, q_axes);
      turn ^= 1;
    }
  }
  of_x.finish(dx, shared, base, at_p, has_p);
  of_y.finish(dy, shared, base, at_p, has_p);
  of_w.finish(dw, shared, base, at_p, has_p);
}

#ifdef FL_SUMS
// The sums of partial[parts][size] over parts, of up to three gradients, one for each blockIdx.y, in a fixed order: each of a column's
// threads adds every kHeight-th part, then a tree. FL_SUMS: {parts, size, threads of a block along a row of parts}.
constexpr int kSumThreads = 256;
struct Sum {
  Index parts, size;
  int width;
};

template <typename To> __device__ __forceinline__ void sum_parts(const C* partial, To* to, const Sum& of) {
  __shared__ C sums[kSumThreads];
  const int thread = threadIdx.x;
  const int height = kSumThreads / of.width, row = thread / of.width;
  const Index column = static_cast<Index>(blockIdx.x) * of.width + thread % of.width;
  C sum = 0;
  if (column < of.size) {
#pragma unroll 8
    for (Index i = row; i < of.parts; i += height) sum += partial[i * of.size + column];
  }
  sums[thread] = sum;
  for (int half = height / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) sums[thread] += sums[thread + half * of.width];
  }
  if (row == 0 && column < of.size) to[column] = static_cast<To>(sums[thread]);
}

extern "C" __global__ void __launch_bounds__(kSumThreads) lerp_sum(
    const C* partial_0, T* to_0, const C* partial_1, T* to_1, const C* partial_2, T* to_2) {
  fl_wait();
  constexpr Sum sums[] = {FL_SUMS};
  constexpr int kCount = sizeof(sums) / sizeof(Sum);
  if (blockIdx.y == 0) sum_parts(partial_0, to_0, sums[0]);
  if (kCount > 1 && blockIdx.y == 1) sum_parts(partial_1, to_1, sums[kCount > 1 ? 1 : 0]);
  if (kCount > 2 && blockIdx.y == 2) sum_parts(partial_2, to_2, sums[kCount > 2 ? 2 : 0]);
}
#endif
#endif
