// group_norm.cu as a C++ library: run_<entry>(grid, block, arguments).
#include "group_norm.cu"

#include "runner.h"

#if FL_KIND == 0
FL_RUN(gn_stats)
FL_RUN(gn_apply)
#else
FL_RUN(gn_grad_sums)
FL_RUN(gn_grad_x)
FL_RUN(gn_grad_vectors)
#endif
