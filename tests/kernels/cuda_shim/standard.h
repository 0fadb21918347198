// All that the shim and the kernels use of C and C++: tests compile it once for all variants (emulated.py).
#pragma once
#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>
