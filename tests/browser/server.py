"""A Jupyter server of a test's own: JupyterLab and Notebook 7 on one free port, in a folder that goes away with it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

import fusionlab

KERNEL = "fusionlab-tests"  # a name of our own: `python3` may be another interpreter's, from the user's or the system's folders
SLOW = 120.0  # seconds a machine that does much else may take to start a server

CONFIG = {
    "ServerApp": {
        "ip": "127.0.0.1",
        "open_browser": False,
        "allow_root": True,
        "terminals_enabled": False,
        # Nobody is left to stop it where the process of the tests was killed: it then goes away by itself.
        "shutdown_no_activity_timeout": 900,
    },
    "MappingKernelManager": {"cull_idle_timeout": 600, "cull_connected": False},
    # The tests ask the application itself whether its kernel is there.
    "LabApp": {"extension_manager": "readonly", "news_url": None, "expose_app_in_browser": True},
    "JupyterNotebookApp": {"expose_app_in_browser": True},
    "LanguageServerManager": {"autodetect": False},
}
# What asks or fetches something at the start would stand before the notebook, or reach for the network.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell stays in the page
    "docmanager-extension/plugin": {"autosave": False},
}


@dataclass(frozen=True)
class Server:
    """A running server: `folder` is what it serves at `url`."""

    url: str
    token: str
    folder: Path

    def lab(self, notebook: Path) -> str:
        """The address of a notebook in JupyterLab, in a workspace of its own."""
        name = notebook.relative_to(self.folder).as_posix()
        return f"{self.url}lab/workspaces/{secrets.token_hex(4)}/tree/{name}?token={self.token}"

    def notebook(self, notebook: Path) -> str:
        """The address of a notebook in Notebook 7."""
        return f"{self.url}notebooks/{notebook.relative_to(self.folder).as_posix()}?token={self.token}"

    def ask(self, path: str, method: str = "GET") -> bytes:
        """The answer of the server's own interface."""
        request = urllib.request.Request(
            self.url + path, method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def stop_kernels(self) -> None:
        """Ends every kernel: a test that is over leaves the processor to the next one."""
        for kernel in json.loads(self.ask("api/kernels")):
            self.ask(f"api/kernels/{kernel['id']}", method="DELETE")


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def _environment(base: Path, token: str) -> dict[str, str]:
    """Nothing of the user's: neither their settings nor their kernels, and the package under test first on the path."""
    source = str(Path(fusionlab.__file__).parents[1])
    paths = (source, os.environ.get("PYTHONPATH", ""))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JUPYTER_CONFIG_DIR": str(base / "config"),
        "JUPYTER_DATA_DIR": str(base / "data"),
        "JUPYTER_RUNTIME_DIR": str(base / "runtime"),
        "IPYTHONDIR": str(base / "ipython"),
        "JUPYTER_TOKEN": token,
        "JUPYTER_PLATFORM_DIRS": "0",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def _prepare(base: Path) -> None:
    argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "FusionLab's tests", "language": "python"}
    _write(base / "data" / "kernels" / KERNEL / "kernel.json", spec)
    _write(base / "config" / "jupyter_server_config.json", CONFIG)
    for name, settings in SETTINGS.items():
        _write(base / "config" / "lab" / "user-settings" / "@jupyterlab" / f"{name}.jupyterlab-settings", settings)
    (base / "runtime").mkdir(parents=True)
    (base / "work").mkdir()


def _address(process: subprocess.Popen, base: Path) -> str:
    """Where the server listens: it says so in its runtime folder, and takes another port where the first is taken."""
    told = base / "runtime" / f"jpserver-{process.pid}.json"
    until = time.monotonic() + SLOW
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, ValueError):  # not there yet, half written, not answering yet
            url = json.loads(told.read_text(encoding="utf-8"))["url"]
            with urllib.request.urlopen(f"{url}api", timeout=5):
                return url
        time.sleep(0.1)
    log = (base / "server.log").read_text(encoding="utf-8", errors="replace")
    raise RuntimeError(f"jupyter lab did not start (exit code {process.poll()}):\n{log[-4000:]}")


def _end(process: subprocess.Popen) -> None:
    """Ends the server and its kernels, which are in sessions of their own, whatever state they are in."""
    family = [process]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            member.kill()
    process.wait(timeout=10)


@contextlib.contextmanager
def serving(base: Path) -> Iterator[Server]:
    """A server over `base / "work"`, which is ended when the block is left, however it is left."""
    token = secrets.token_hex(16)
    _prepare(base)
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--ServerApp.port=0",
        f"--ServerApp.root_dir={base / 'work'}",
    ]
    with (base / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(base, token), cwd=base / "work"
        )
        try:
            yield Server(_address(process, base), token, base / "work")
        finally:
            _end(process)
