// Programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA,
// "griddepcontrol"): a kernel that is started before the one ahead of it on the stream has ended, and waits here for its results.
// Instructions of sm_90 and later; elsewhere kernels start when all before them has ended, and there is nothing to wait for.

#pragma once

// Before the first access to global memory, reads and writes alike: what came before may still read what this kernel overwrites. No pointer
// of such a kernel may be `const __restrict__`: the compiler takes that memory for constant, and may load from it before the wait.
static __device__ __forceinline__ void fl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel behind this one start, as far as there is room for it, from the time on when every block has been here or has ended. What
// it does before its own wait may read nothing that is written since the first kernel of the launch plan began.
static __device__ __forceinline__ void fl_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
