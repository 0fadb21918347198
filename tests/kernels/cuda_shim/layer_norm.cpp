// layer_norm.cu as a C++ library: run_<entry>(grid, block, arguments).
#include "layer_norm.cu"

#include "runner.h"

#if FL_KIND == 0
FL_RUN(norm_forward)
#else
#if FL_KIND == 1
FL_RUN(norm_backward)
#else
FL_RUN(norm_columns)
#endif
FL_RUN(norm_sum)
#endif
