// Rows of x as the right operand of a product reads them, with or without a norm: statistics in two passes over what the threads hold.
#pragma once

constexpr int kNoNorm = 0, kLayerNorm = 1, kRmsNorm = 2;

// How the block's warps share kCount rows of kLength entries: a team of warps for each row, a thread of it holds kHeld words of 8 entries.
template <int kCount, int kLength> struct Teams {
  static constexpr int kWarpsOfOne = kCount == 1 ? 8 : kCount == 2 ? 4 : kCount <= 4 ? 2 : 1;
  static constexpr int kThreadsOfOne = 32 * kWarpsOfOne, kAtOnce = kThreads / kThreadsOfOne;
  static constexpr int kWords = kLength / 8, kHeld = (kWords + kThreadsOfOne - 1) / kThreadsOfOne;
};

// The sum of a team's values, to all of its threads; `place` is scratch memory of a float for each warp of the block.
template <int kWarpsOfOne> __device__ __forceinline__ float team_sum(float value, float* place) {
#pragma unroll
  for (int other = 1; other < 32; other *= 2) value += from_lane(value, other);
  if (kWarpsOfOne == 1) return value;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) place[warp] = value;
  block_meets();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarpsOfOne; ++i) sum += place[warp / kWarpsOfOne * kWarpsOfOne + i];
  return sum;
}

// Two entries, the first in the lower half of the word, after the norm and rounded as it alone would.
__device__ __forceinline__ unsigned normed_two(unsigned two, float mean, float factor, float2 scale, float2 bias) {
  const float2 x = floats_of(two);
  return rounded((x.x - mean) * factor * scale.x + bias.x, (x.y - mean) * factor * scale.y + bias.y);
}

struct __align__(16) Parameters { // of eight entries
  P of[8];
};

__device__ __forceinline__ Parameters parameters_at(const P* all, int number, float otherwise) {
  if (all) return reinterpret_cast<const Parameters*>(all)[number];
  Parameters same;
#pragma unroll
  for (int j = 0; j < 8; ++j) same.of[j] = static_cast<P>(otherwise);
  return same;
}

__device__ __forceinline__ uint4 normed_word(uint4 word, float mean, float factor, const Parameters& scale, const Parameters& bias) {
  unsigned to[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    to[j] = normed_two(word_of(word, j), mean, factor, parameters_of(scale.of + 2 * j), parameters_of(bias.of + 2 * j));
  }
  return {to[0], to[1], to[2], to[3]};
}

// Mean, and 1 / the standard deviation, of a row of which the team's threads hold the words.
template <int kNorm, class Team, int kLength>
__device__ __forceinline__ float2 statistics_of(const uint4 (&held)[Team::kHeld], float epsilon, float* place) {
  const int mine = threadIdx.x % Team::kThreadsOfOne;
  float sum = 0.0f, squares = 0.0f;
  if (kNorm == kLayerNorm) {
#pragma unroll
    for (int i = 0; i < Team::kHeld; ++i)
      if (mine + i * Team::kThreadsOfOne < Team::kWords)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = floats_of(word_of(held[i], j));
          sum += two.x + two.y;
        }
    sum = team_sum<Team::kWarpsOfOne>(sum, place);
  }
  const float mean = sum * (1.0f / kLength);
#pragma unroll
  for (int i = 0; i < Team::kHeld; ++i)
    if (mine + i * Team::kThreadsOfOne < Team::kWords)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = floats_of(word_of(held[i], j));
        squares += (two.x - mean) * (two.x - mean) + (two.y - mean) * (two.y - mean);
      }
  squares = team_sum<Team::kWarpsOfOne>(squares, place + kWarps);
  return {mean, 1.0f / sqrtf(squares * (1.0f / kLength) + epsilon)};
}

// A thread's words of a row that lies in memory as it is.
template <class Team, int kLength> struct WordsOf {
  const T* rows;
  __device__ __forceinline__ void operator()(uint4 (&held)[Team::kHeld], int row) const {
    const int mine = threadIdx.x % Team::kThreadsOfOne;
    const uint4* const from = reinterpret_cast<const uint4*>(rows + static_cast<Index>(row) * kLength);
#pragma unroll
    for (int i = 0; i < Team::kHeld; ++i)
      if (mine + i * Team::kThreadsOfOne < Team::kWords) held[i] = __ldcg(from + mine + i * Team::kThreadsOfOne);
  }
};

// Norms kCount rows of kLength entries and gives them to `keep(row, number of the word, word)`. All threads of the block come here. `take(held,
// row)` gives a thread its words of a row; `place`: 16 floats of shared memory.
template <int kNorm, int kCount, int kLength, class Take, class Keep>
__device__ __forceinline__ void norm_rows(const Take& take, const P* scale, const P* bias, float epsilon, float* place, const Keep& keep) {
  using Team = Teams<kCount, kLength>;
  const int mine = threadIdx.x % Team::kThreadsOfOne;
#pragma unroll 1
  for (int row = threadIdx.x / Team::kThreadsOfOne; row < (kCount + Team::kAtOnce - 1) / Team::kAtOnce * Team::kAtOnce; row += Team::kAtOnce) {
    uint4 held[Team::kHeld];
    Parameters scales[Team::kHeld], biases[Team::kHeld]; // on their way with x
#pragma unroll
    for (int i = 0; i < Team::kHeld; ++i) {
      const int number = mine + i * Team::kThreadsOfOne;
      if (number < Team::kWords) scales[i] = parameters_at(scale, number, 1.0f), biases[i] = parameters_at(bias, number, 0.0f);
    }
    take(held, row < kCount ? row : 0);
    const float2 found = statistics_of<kNorm, Team, kLength>(held, epsilon, place);
#pragma unroll
    for (int i = 0; i < Team::kHeld; ++i) {
      const int number = mine + i * Team::kThreadsOfOne;
      if (number < Team::kWords && row < kCount)
        keep(row, number, normed_word(held[i], found.x, found.y, scales[i], biases[i]));
    }
  }
}
