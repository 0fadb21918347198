"""`NOTICE`: what an installation brings, with licences, from the metadata of what is installed here.

    python -m tests.house.notice          prints the tables of NOTICE anew
    python -m tests.house.notice --write  writes them into NOTICE

A licence is the one that a distribution's metadata states; where that is empty or a whole text, `STATED` has it, from its licence file.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NOTICE = ROOT / "NOTICE"
START, END = "Installed with the package\n", "\nOther code\n"
# Distribution -> licence, by its licence file or classifier.
STATED = {
    "contourpy": "BSD-3-Clause",
    "cycler": "BSD-3-Clause",
    "ipython-pygments-lexers": "BSD-3-Clause",
    "jupyterlab-widgets": "BSD-3-Clause",
    "kiwisolver": "BSD-3-Clause",
    "matplotlib": "Matplotlib licence (based on PSF-2.0)",
    "prompt-toolkit": "BSD-3-Clause",
    "ptyprocess": "ISC",
    "pexpect": "ISC",
    "resvg-py": "MIT (its binary holds resvg, Apache-2.0 OR MIT, and further Rust crates named in its SBOM)",
    "scipy": "BSD-3-Clause",
    "wcwidth": "MIT",
}
SPELLED = {
    "BSD 3-Clause License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "ISC license": "ISC",
    "MIT License": "MIT",
    "LicenseRef-NVIDIA-Proprietary": "NVIDIA's licence (proprietary)",
}
# Of the extras for CUDA, which the machine that writes NOTICE may lack.
EXTRAS = {
    "absl-py": "Apache-2.0",
    "cupy-cuda12x": "MIT",
    "cupy-cuda13x": "MIT",
    "jax": "Apache-2.0; with [cuda12] or [cuda13] NVIDIA's libraries (cuBLAS, cuDNN, NCCL and others), NVIDIA's licences (proprietary)",
    "nvidia-cuda-runtime": "NVIDIA's licence (proprietary)",
    "nvidia-cuda-runtime-cu12": "NVIDIA's licence (proprietary)",
    "nvmath-python": "Apache-2.0",
    "vl-convert-python": "BSD-3-Clause",
}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def base() -> list[str]:
    """The dependencies of the package, as pyproject spells them."""
    return [Requirement(text).name for text in project()["dependencies"]]


def extras() -> list[str]:
    """What the extras for users add."""
    optional = project()["optional-dependencies"]
    return list(dict.fromkeys(Requirement(t).name for extra in ("cuda12", "cuda13", "pdf") for t in optional[extra]))


def licence(name: str) -> str:
    found = importlib.metadata.metadata(name)
    if canonical(name) in STATED:
        return STATED[canonical(name)]
    text = (found.get("License-Expression") or found.get("License") or "").strip()
    first = text.partition("\n")[0]
    if not text or (first != text and first not in SPELLED):
        raise LookupError(f"{name}: its metadata has no short licence; read its licence file, and add it to STATED")
    return SPELLED.get(first, first)


def needed(names: list[str]) -> Iterator[str]:
    """Everything that those need in turn, on this platform, without themselves."""
    seen, todo = {canonical(n) for n in names}, list(names)
    for name in todo:
        for text in importlib.metadata.requires(name) or ():
            asked = Requirement(text)
            if canonical(asked.name) in seen or (asked.marker and not asked.marker.evaluate({"extra": ""})):
                continue
            seen.add(canonical(asked.name))
            todo.append(asked.name)
            yield canonical(asked.name)


def tables() -> str:
    """The part of NOTICE that is made from metadata."""
    direct = base()
    lines = [START, *(f"  {name}: {licence(name)}" for name in direct)]
    lines += ["", "Needed by those", "", *(f"  {name}: {licence(name)}" for name in sorted(needed(direct)))]
    lines += ["", "Added by the extras cuda12, cuda13 and pdf", "", *(f"  {name}: {EXTRAS[name]}" for name in extras())]
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        text = NOTICE.read_text(encoding="utf-8")
        NOTICE.write_text(text[: text.index(START)] + tables() + text[text.index(END) :], encoding="utf-8")
    else:
        print(tables())


if __name__ == "__main__":
    main()
