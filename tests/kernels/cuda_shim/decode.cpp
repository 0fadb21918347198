// decode.cu as a C++ library: run_<entry>(grid, block, arguments).
#define FL_BLOCK_STARTS
#include "decode.cu"

#include "runner.h"

FL_RUN_CLUSTER(decode_qkv, FL_QKV_CLUSTER)
FL_RUN_CLUSTER(decode_attend, FL_PARTS)
FL_RUN_CLUSTER(decode_out, FL_OUT_CLUSTER)
FL_RUN_CLUSTER(decode_up, FL_UP_CLUSTER)
FL_RUN_CLUSTER(decode_down, FL_DOWN_CLUSTER)
#if FL_NORM1
FL_RUN(decode_norm1)
#endif
#if FL_NORM2
FL_RUN(decode_norm2)
#endif
