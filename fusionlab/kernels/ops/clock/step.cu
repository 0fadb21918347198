// Next to no work, four elements a thread as XLA's own kernels take: for timing what a launch costs. `count` is a multiple of 4.

#include "../early.cuh"

extern "C" __global__ void step(const float4* from, float4* to, long long count) {
    fl_wait();
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (4 * i >= count) return;
    const float4 x = from[i];
    to[i] = make_float4(x.x + 1.0f, x.y + 1.0f, x.z + 1.0f, x.w + 1.0f);
}
