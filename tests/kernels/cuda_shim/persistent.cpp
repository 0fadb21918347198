// persistent.cu as a C++ library: its blocks run in turns, as those of one cluster.
#define FL_BLOCK_STARTS
#define __noinline__
#include "persistent.cu"

#include "runner.h"

FL_RUN(decode_begin)
FL_RUN_CLUSTER(decode_layers, FL_BLOCKS)
