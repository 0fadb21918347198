"""Tests that need a GPU: `FUSIONLAB_TEST_PLATFORMS=cuda,cpu pytest tests/gpu`. The suites that they run are those of `tests/kernels`."""
