// lerp.cu as a C++ library: run_<entry>(grid, block, arguments).
#include "lerp.cu"

#include "runner.h"

#if FL_KIND == 0
FL_RUN(lerp_forward)
#elif FL_KIND == 1
FL_RUN(lerp_backward_flat)
#else
FL_RUN(lerp_backward)
#ifdef FL_SUMS
FL_RUN(lerp_sum)
#endif
#endif
