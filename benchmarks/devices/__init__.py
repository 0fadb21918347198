"""Several GPUs of one host: `tensor_parallel` (an encoder layer spread over them), `fsdp` (a train step with sharded parameters)."""
