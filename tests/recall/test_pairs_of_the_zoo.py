"""What `python -m benchmarks pairs` tells of the zoo's train steps, on some of them; the whole zoo stands in benchmarks/results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import pytest
from zoo.catalogue import Program, programs

import fusionlab as fl
from benchmarks.cotangents import check_cotangents
from benchmarks.pair_fates import sites_of
from benchmarks.pairs import Outcome, arrays, equality, tables

PROGRAMS = {p.model.id: p for p in programs() if p.dtype == "f32" and p.variant == "train"}
PAIRED = {
    "handwritten/mlp_gelu_erf_erfc": 2,
    "handwritten/swiglu": 2,
    "attention/rotary": 1,
    "norms/layer_norm_two_pass": 0,
    "jaxnn/encoder": 0,
    "linen/encoder": 0,
    "nnx/gpt": 0,
    "haiku/encoder_decoder": 0,
}
