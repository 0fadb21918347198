// What a boolean mask of keys is, for each batch entry: how many keys it leaves, and whether those are the first ones. A block takes one row.
// `found` has two numbers for each row: the count, and 1 where the mask is a prefix.
extern "C" __global__ void __launch_bounds__(256) mask_probe(const unsigned char* mask, int* found, long long keys) {
  const unsigned char* row = mask + blockIdx.x * keys;
  int count = 0, last = -1; // of this thread's keys: how many are seen, and the last of them
  for (long long i = threadIdx.x; i < keys; i += blockDim.x) {
    if (row[i]) {
      ++count;
      last = static_cast<int>(i);
    }
  }
  __shared__ int counts[256], lasts[256];
  counts[threadIdx.x] = count;
  lasts[threadIdx.x] = last;
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      counts[threadIdx.x] += counts[threadIdx.x + half];
      if (lasts[threadIdx.x + half] > lasts[threadIdx.x]) lasts[threadIdx.x] = lasts[threadIdx.x + half];
    }
  }
  if (threadIdx.x == 0) {
    found[2 * blockIdx.x] = counts[0];
    found[2 * blockIdx.x + 1] = lasts[0] + 1 == counts[0];
  }
}
