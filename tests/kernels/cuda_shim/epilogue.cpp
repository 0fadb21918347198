// epilogue.cu as a C++ library: run_<entry>(grid, block, arguments).
#include "epilogue.cu"

#include "runner.h"

FL_RUN(epilogue_forward)
FL_RUN(epilogue_backward)
#if FL_DBIAS
FL_RUN(epilogue_sum)
#endif
