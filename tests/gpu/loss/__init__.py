"""The head of a language model and its loss on a CUDA device."""
