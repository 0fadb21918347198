// Keeps a stream busy for a while, so that the host can queue what is to be timed behind it.

extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
