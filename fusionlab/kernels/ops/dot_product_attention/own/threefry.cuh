// The bits of jax.random with its default generator, threefry2x32, and jax_threefry_partitionable=True: entry i of an array of 32-bit words
// is the exclusive or of the two words that the counter (i / 2^32, i % 2^32) gives. Source: Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3", doi:10.1145/2063384.2063405; jax/_src/prng.py (`_threefry_random_bits_partitionable`).
#pragma once

__device__ __forceinline__ unsigned rotated(unsigned x, int by) { return x << by | x >> (32 - by); }

__device__ __forceinline__ unsigned threefry_bits(unsigned key0, unsigned key1, unsigned long long entry) {
  const unsigned keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAu};
  constexpr int kBy[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  unsigned x = static_cast<unsigned>(entry >> 32) + keys[0], y = static_cast<unsigned>(entry) + keys[1];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x += y;
      y = rotated(y, kBy[i % 2][j]) ^ x;
    }
    x += keys[(i + 1) % 3];
    y += keys[(i + 2) % 3] + i + 1;
  }
  return x ^ y;
}

// jax.random.bernoulli(key, keep) at an entry: whether its uniform number in [0, 1) is below `keep`.
__device__ __forceinline__ bool kept(unsigned key0, unsigned key1, unsigned long long entry, float keep) {
  return __uint_as_float(threefry_bits(key0, key1, entry) >> 9 | 0x3f800000u) - 1.0f < keep;
}
