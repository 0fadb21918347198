"""What is measured and shown of several devices: mesh, collectives before and after, the time of each. The trials are in on_devices.py."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated import environment

PROGRAM = Path(__file__).with_name("on_devices.py")
NAMES = [
    node.name
    for node in ast.parse(PROGRAM.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "trial" for d in node.decorator_list)
]


@pytest.fixture(scope="module")
def problems():
    """What went wrong with each trial, None where nothing did."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment(4), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("name", NAMES)
def test_on_four_devices(problems, name):
    assert problems[name] is None, problems[name]
