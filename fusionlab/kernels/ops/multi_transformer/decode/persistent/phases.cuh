// A product as a phase of persistent.cu, with the norm ahead of it. `ring` is the warp's part of the stream of weights and caches, in the order in
// which it is used here.
#pragma once

// What of x is beyond the inner axis is 0.
template <class S> __device__ __forceinline__ void keep_nothing() {
  constexpr int kWords = S::kHeld * S::kRound / 8;
  if (S::kRounds * S::kShare * S::kStep != S::kInner)
    for (int i = threadIdx.x; i < kRows * kWords; i += kThreads)
      if (S::entry_of(i % kWords * 8) >= S::kInner) *reinterpret_cast<uint4*>(rows_in() + i / kWords * S::kRowPitch + i % kWords * 8) = {0, 0, 0, 0};
}

// One text: what the block's slices need of x, as it is, to shared memory: one part of it, to the part's buffer.
template <class S> __device__ __forceinline__ void ask_rows(const Given& x, int buffer, int part) {
  constexpr int kWords = S::kHeld * S::kRound / 8;
  T* const to = rows_in() + buffer * S::kRowPitch;
  if (kFlagged && x.flag) {
    constexpr int kCount = kWords >= 2 * kThreads ? 2 : 1;
    const auto kept_at = [&](int start, int i) { return (start + i * kThreads) * 8; };
#pragma unroll 1
    for (int start = threadIdx.x; start < kWords; start += kCount * kThreads) {
      uint4 words[kCount];
      const auto entry = [&](int i) { return S::entry_of(kept_at(start, i), part); };
      const auto is_there = [&](int i) { return start + i * kThreads < kWords && entry(i) < S::kInner; };
      take_entries(words, x, entry, is_there);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (start + i * kThreads < kWords) *reinterpret_cast<uint4*>(to + kept_at(start, i)) = is_there(i) ? words[i] : uint4{0, 0, 0, 0};
    }
    return;
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < kWords; i += kThreads) {
    const int entry = S::entry_of(i * 8, part);
    copy_16(to + i * 8, static_cast<const T*>(x.at) + (entry < S::kInner ? entry : 0), entry < S::kInner);
  }
}

// More texts: a warp asks for what its own slices need of x, and nobody else waits for that. All of it at once, in no more than four pieces of
// whole lines, each used as soon as it is there; or, where a block does not keep all, two parts, and a further one whenever one is used.
template <class S> struct OwnRows {
  static constexpr int kLine = 64; // entries
  static constexpr int kPiece = S::kWhole ? most(kLine / S::kStep, (S::kRounds + 3) / 4) : S::kHeld; // slices
  static constexpr int kPieces = (S::kRounds + kPiece - 1) / kPiece, kWords = kPiece * S::kStep / 8;
  static constexpr int kAhead = S::kWhole ? kPieces : 2; // pieces asked for before the first is used
  const T* x;
  int number, slices; // of the pair's warps; of the warp
  int piece;          // that is used next, over all tiles

  static __device__ __forceinline__ T* place_of(int piece) {
    const int warp = threadIdx.x / 32;
    return rows_in() + warp * S::kHeld * S::kStep + (S::kWhole ? piece * kPiece * S::kStep : piece % 2 * kRows * S::kRowPitch);
  }
  __device__ __forceinline__ void ask(int which) const {
    const int first = which % kPieces * kPiece;
    T* const to = place_of(which);
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < kRows * kWords; i += 32) {
      const int row = i / kWords, at = i % kWords * 8, slice = first + at / S::kStep;
      if (S::kWhole && S::kHeld % kPiece != 0 && slice >= S::kHeld) continue;
      const int entry = number * S::kNextWarp + slice * S::kNextSlice + at % S::kStep;
      copy_16(to + row * S::kRowPitch + at, x + static_cast<Index>(row) * S::kInner + (entry < S::kInner ? entry : 0), entry < S::kInner);
    }
    copies_closed();
  }
  __device__ __forceinline__ void begin() const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ask(i);
  }
  // Waits for what is used next, of whole rows no further than that.
  __device__ __forceinline__ void first_is_there() const { copies_left<kAhead - 1>(); }
  __device__ __forceinline__ void is_there() const {
    const int left = S::kWhole ? kPieces - 1 - piece : 1;
    if (left == 3) copies_left<3>();
    if (left == 2) copies_left<2>();
    if (left == 1) copies_left<1>();
    if (left <= 0) copies_left<0>();
    warp_meets();
  }
};

// The norm ahead of a product. `pieces`: statistics of x, as `Made`, of the product that made it, has them, for more than one text.
template <class Made_> struct Norm {
  using Made = Made_;
  const float2* pieces;
  const P *scale, *bias;
  float epsilon;
};
constexpr Norm<void> kWithout = {nullptr, nullptr, nullptr, 0.0f};
template <class S> constexpr bool kNormsSlices = kRows > 1 && S::kNorm != kNoNorm; // rather than all of x ahead of the product

// One text: x of a phase to shared memory after its norm. Gives what is left to be read as it is: x, if it has no norm.
template <class S, class Normed> __device__ __forceinline__ Given keep_normed(const Given& x, const Normed& norm) {
  if (kRows > 1 || S::kNorm == kNoNorm) return x;
  T* const to = rows_in();
  using Team = Teams<kRows, S::kInner>;
  const auto take = [&](uint4(&held)[Team::kHeld], int row) {
    const int mine = threadIdx.x % Team::kThreadsOfOne;
    const auto number = [&](int i) { return mine + i * Team::kThreadsOfOne; };
    take_entries(held, x, [&](int i) { return static_cast<Index>(row) * S::kInner + number(i) * 8; }, [&](int i) { return number(i) < Team::kWords; });
  };
  norm_rows<S::kNorm, kRows, S::kInner>(take, norm.scale, norm.bias, norm.epsilon, place_in(), [&](int row, int number, uint4 word) {
    if (S::is_kept(number * 8)) *reinterpret_cast<uint4*>(to + row * S::kRowPitch + S::kept_at(number * 8)) = word;
  });
  keep_nothing<S>();
  return {nullptr, 0};
}

// More texts: the norm's parameters of what the block keeps of x to shared memory. They may be asked for before x is there.
template <class S, class Normed> __device__ __forceinline__ void ask_parameters(const Normed& norm) {
  if (!kNormsSlices<S>) return;
  constexpr int kEach = 16 / sizeof(P); // of a copy
#pragma unroll 1
  for (int i = threadIdx.x * kEach; i < S::kHeld * S::kRound; i += kThreads * kEach) {
    const int entry = S::entry_of(i), place = entry < S::kInner ? entry : 0;
    if (norm.scale) copy_16(scales_in() + i, norm.scale + place, entry < S::kInner);
    if (norm.bias) copy_16(biases_in() + i, norm.bias + place, entry < S::kInner);
  }
}

// x of a slice, of a warp that keeps it to itself, to what it is after its norm, where it lies: `rows` is where it begins in the first row.
template <class S> struct SliceNorm {
  static constexpr int kWords = S::kStep / 8, kAtOnce = 32 / kWords, kTimes = (kRows + kAtOnce - 1) / kAtOnce;
  static_assert(32 % kWords == 0);
  const bool scales, biases; // whether there are any
  float2 found[kTimes];      // of the lane's rows

  template <class Normed> explicit __device__ __forceinline__ SliceNorm(const Normed& norm) : scales(norm.scale), biases(norm.bias) {
#pragma unroll
    for (int t = 0; t < kTimes; ++t) found[t] = statistics_in()[row_of(t) < kRows ? row_of(t) : 0];
  }
  static __device__ __forceinline__ int row_of(int t) { return static_cast<int>(threadIdx.x) % 32 / kWords + t * kAtOnce; }

  __device__ __forceinline__ void operator()(T* rows) const {
    const int kept = static_cast<int>(rows - rows_in()) + threadIdx.x % kWords * 8;
    if (S::kRounds * S::kShare * S::kStep == S::kInner || S::entry_of(kept) < S::kInner) {
      const Parameters scale = parameters_at(scales ? scales_in() : nullptr, kept / 8, 1.0f);
      const Parameters bias = parameters_at(biases ? biases_in() : nullptr, kept / 8, 0.0f);
#pragma unroll
      for (int t = 0; t < kTimes; ++t) {
        if (row_of(t) >= kRows) break;
        uint4* const word = reinterpret_cast<uint4*>(rows_in() + row_of(t) * S::kRowPitch + kept);
        *word = normed_word(*word, found[t].x, found[t].y, scale, bias);
      }
    }
    warp_meets();
  }
};

template <class S> using Sums = float[S::kTile / 16][kRowTiles][4];

// `rows` is where the slice's part of x begins.
template <class S> __device__ __forceinline__ void multiply_slice(Sums<S>& sums, const unsigned char* slice, const T* rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < S::kStep; k += 16) {
    unsigned right[kRowTiles][2];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int row = lane / 4 + 8 * j;
      const T* const from = rows + (row < kRows ? row : 0) * S::kRowPitch + k + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) right[j][half] = row < kRows ? *reinterpret_cast<const unsigned*>(from + 8 * half) : 0;
    }
#pragma unroll
    for (int m = 0; m < S::kTile / 16; ++m) {
      unsigned left[4];
      if (S::kTurned)
        load_matrices(left, slice + S::word_at(16 * m + lane % 16, k / 8 + lane / 16) * 16);
      else
        load_transposed(left, slice + S::word_at(k + lane % 8 + lane / 16 * 8, 2 * m + lane / 8 % 2) * 16);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) multiply(sums[m][j], left, right[j]);
    }
  }
}

struct Unchanged {
  __device__ __forceinline__ void operator()(T*) const {}
};

// `count` slices of a warp, with x of each as `prepare` leaves it.
template <class S, class Prepare>
__device__ __forceinline__ void multiply_slices(Ring& ring, Sums<S>& sums, T* rows, int count, const Prepare& prepare) {
#pragma unroll 1
  for (; count > 0; --count, rows += S::kStep) {
    prepare(rows);
    ring.filled();
    multiply_slice<S>(sums, ring.now(), rows);
    ring.used();
  }
}

// A warp's slices of a tile, piece by piece. `more`: whether another tile follows.
template <class S, class Prepare>
__device__ __forceinline__ void multiply_pieces(Ring& ring, Sums<S>& sums, OwnRows<S>& own, bool more, const Prepare& prepare) {
  using Own = OwnRows<S>;
#pragma unroll 1
  for (int i = 0; i < Own::kPieces; ++i, ++own.piece) {
    own.is_there();
    const int left = own.slices - i * Own::kPiece;
    multiply_slices<S>(ring, sums, Own::place_of(own.piece), left < Own::kPiece ? left : Own::kPiece, prepare);
    if (S::kWhole) continue;
    warp_meets(); // all lanes have read it
    if (more || i + 2 < Own::kPieces)
      own.ask(own.piece + 2);
    else
      copies_closed(); // as many groups as if there were one
  }
}

// The sums of all warps to shared memory.
template <class S> __device__ __forceinline__ void keep_sums_of_warp(float* to, const Sums<S>& sums, bool more) {
  const int lane = threadIdx.x % 32;
  float* const mine = to + threadIdx.x / 32 % kKeepers * kRows * (S::kTile + 4);
#pragma unroll
  for (int m = 0; m < S::kTile / 16; ++m)
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * j + lane % 4 * 2 + e % 2, column = 16 * m + lane / 4 + e / 2 * 8;
        float* const at = mine + row * (S::kTile + 4) + column;
        if (row < kRows) *at = more ? sums[m][j][e] + *at : sums[m][j][e];
      }
}
template <class S> __device__ __forceinline__ void keep_sums(float* to, const Sums<S>& sums) {
  const bool first = static_cast<int>(threadIdx.x) / 32 >= kWarps - kKeepers;
  if (first) keep_sums_of_warp<S>(to, sums, false);
  if (kKeepers == kWarps) return;
  block_meets();
  if (!first) keep_sums_of_warp<S>(to, sums, true);
}

template <class S> __device__ __forceinline__ float over_warps(const float* sums, int row, int column) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kKeepers; ++w) total += sums[(w * kRows + row) * (S::kTile + 4) + column];
  return total;
}

// out = act(x matrix + bias) [+ residual] with x in shared memory, each step rounded to T as if it were done alone. Each block of a pair
// goes over its slices of the inner axis and finishes half of the tile's columns, with what the other one gives it. `x`: null where the block
// keeps all of it already; else it is read here, each part while the one before is used. `pieces`: for the statistics of what is made, if a
// norm (kNext) is behind it.
template <class S, bool kActive, int kNext, class Normed>
__device__ __forceinline__ void project(Ring& ring, int& given, const Given& x, const Normed& norm, const T* bias0, const T* bias1, const T* bias2,
                                        const Given& residual, const Given& out, float2* pieces) {
  constexpr bool kNorms = kNormsSlices<S>, kOwn = kRows > 1; // a warp reads x for itself
  static_assert(S::kWhole || !kNorms);
  const int warp = threadIdx.x / 32, number = blockIdx.x % kPair * kWarps + warp, slices = S::slices_of(number);
  constexpr int kHalf = S::kMade / 2, kResults = kRows * kHalf, kEach = (kResults + kThreads - 1) / kThreads;
  OwnRows<S> own = {static_cast<const T*>(x.at), number, slices, 0};
  if constexpr (kNorms) {
    const typename Normed::Made::Row statistics(norm.pieces); // ahead of x, which is more
    own.begin();
    statistics.put_together(statistics_in(), norm.epsilon);
    own.first_is_there(); // and the norm's parameters, asked for before it
    block_meets();
  } else if constexpr (kOwn) {
    if (x.at)
      own.begin();
    else
      block_meets(); // x is there
  } else if (x.at) {
    ask_rows<S>(x, 0, 0);
  }
  int buffer = 0; // of the part in use
#pragma unroll 1
  for (int tile = blockIdx.x / kPair; tile < S::kTiles; tile += kPairs, ++given) {
    const auto place = S::place(tile);
    const T* const bias = place.matrix == 0 ? bias0 : place.matrix == 1 ? bias1 : bias2;
    const int first = (threadIdx.x + 32 * given) % kThreads; // the warps take turns at what is to do at the end
    T added[kEach], second[kEach], before[kEach];
    const auto row_of = [&](int t) { return (first + t * kThreads) / kHalf; };
    const auto in_tile = [&](int t, int rank) { return rank * kHalf + (first + t * kThreads) % kHalf; };
    const auto column_of = [&](int t) { return place.column + in_tile(t, blockIdx.x % kPair); };
    const auto is_mine = [&](int t) { return first + t * kThreads < kResults && column_of(t) < place.columns; };
#pragma unroll
    for (int t = 0; t < kEach; ++t) {
      added[t] = second[t] = before[t] = static_cast<T>(0.0f);
      if (is_mine(t) && bias) added[t] = fresh(bias + column_of(t));
      if (S::kGated && is_mine(t) && bias1) second[t] = fresh(bias1 + column_of(t));
      if (is_mine(t) && residual.at) before[t] = take_entry(residual, static_cast<Index>(row_of(t)) * S::kPitch + column_of(t));
    }
    Sums<S> sums = {};
    const bool first_tile = tile == static_cast<int>(blockIdx.x) / kPair, more = tile + kPairs < S::kTiles;
    T* const rows = rows_in() + warp * S::kHeld * S::kStep;
    if constexpr (kOwn) {
      if (S::kWhole && (!first_tile || !x.at))
        multiply_slices<S>(ring, sums, rows, slices, Unchanged());
      else if constexpr (kNorms)
        multiply_pieces<S>(ring, sums, own, more, SliceNorm<S>(norm));
      else
        multiply_pieces<S>(ring, sums, own, more, Unchanged());
    } else {
#pragma unroll 1
      for (int part = 0; part < S::kParts; ++part) {
        if (!S::kWhole || first_tile) {
          copies_done();
          block_meets(); // x is there, and nobody reads the part before
          const bool last = part + 1 == S::kParts;
          if (!S::kWhole && (!last || more)) ask_rows<S>(x, 1 - buffer, last ? 0 : part + 1);
        }
        const int left = slices - part * S::kHeld;
        multiply_slices<S>(ring, sums, rows + buffer * S::kRowPitch, left < S::kHeld ? left : S::kHeld, Unchanged());
        if (!S::kWhole) buffer = 1 - buffer;
      }
    }
    if (kSumsBuffers == 1) block_meets(); // nobody reads the sums of the tile before
    float* const all = sums_in(given % 2); // the other one, if there is one, may still be read
    float* const taken = taken_in(given % 2);
    keep_sums<S>(all, sums);
    Gate* const gate = taken_gates() + given % 2;
    if (threadIdx.x == 0) gate_expects(gate, kResults * (S::kGated ? 2 : 1) * sizeof(float));
    block_meets();
#pragma unroll
    for (int t = 0; t < kEach; ++t) {
      if (first + t * kThreads >= kResults) continue;
      const int its = in_tile(t, 1 - blockIdx.x % kPair);
      give_partner(taken + first + t * kThreads, over_warps<S>(all, row_of(t), its), gate);
      if (S::kGated) give_partner(taken + kResults + first + t * kThreads, over_warps<S>(all, row_of(t), S::kMade + its), gate);
    }
    const auto sum_of = [&](int t, int which) {
      const float own = over_warps<S>(all, row_of(t), which * S::kMade + in_tile(t, blockIdx.x % kPair));
      const float other = taken[which * kResults + first + t * kThreads];
      return blockIdx.x % kPair == 0 ? own + other : other + own;
    };
    gate_waits_for_partner(gate, given / 2 % 2);
#pragma unroll
    for (int t = 0; t < kEach; ++t) {
      float value = 0.0f;
      if (is_mine(t)) {
        value = sum_of(t, 0) + static_cast<float>(added[t]);
        if (kActive) value = activation(value);
        if (S::kGated) {
          const bool alone = !bias && !bias1; // then the op is one step, rounded once
          const float other = sum_of(t, 1) + static_cast<float>(second[t]);
          value = alone ? value * other : once(value) * once(other);
        }
        if (residual.at) value = static_cast<float>(before[t]) + once(value);
      }
      const float next = from_lane(value, 1); // of the column beside
      if (is_mine(t) && threadIdx.x % 2 == 0)
        give_entries(out, static_cast<Index>(row_of(t)) * S::kPitch + place.before + column_of(t), value, next);
      if (kRows > 1 && kNext != kNoNorm) {
        using Made = Pieces<S, kNext>;
        const int piece = tile * kPair + blockIdx.x % kPair;
        const float2 found = statistics_of_piece<kNext, kHalf>(once(value), is_mine(t), Made::size_of(piece));
        if (first + t * kThreads < kResults && (first + t * kThreads) % kHalf == 0) pieces[row_of(t) * Made::kCount + piece] = found;
      }
    }
  }
}
