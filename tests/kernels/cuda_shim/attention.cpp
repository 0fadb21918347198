// attention.cu as a C++ library: run_<entry>(grid, block, arguments).
#define FL_BLOCK_STARTS
#include "attention.cu"

#include "runner.h"

#ifdef FL_FORWARD
FL_RUN(attention_forward)
#endif
#ifdef FL_BACKWARD_QUERY
FL_RUN(attention_query)
#endif
#ifdef FL_BACKWARD_KEYS
FL_RUN(attention_keys)
#endif
