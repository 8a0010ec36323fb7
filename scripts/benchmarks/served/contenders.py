"""Implementations in processes of their own: start them, give them bursts, end them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from benchmarks.served import streams
from benchmarks.served.burst import Burst
from benchmarks.served.engines import OUR_OPTIONS, Settings, vllm_options
from console.parent import ends_with_this_process

# What is measured unless others are named.
USUAL = ("ours", "vllm", "ours-server", "vllm-server")
IMPLEMENTATIONS = (*USUAL, "ours-parity", "ours-parity-parts", "ours-structured", "ours-lora")
SCRIPTS = Path(__file__).resolve().parents[2]
# vLLM neither asks the network, nor reports, nor compiles what is not part of it.
_VLLM = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
}
# Our server with a folder behind the packages that are installed: PYTHONPATH would put it first,
# and it may hold another torch.
_WITH_FOLDER = """
import sys
sys.path.append({!r})
from absorbed_mla.serving.server.cli import main
sys.exit(main())
"""
_OUR_SERVER_NEEDS = ("starlette", "uvicorn", "uvloop", "httptools", "pydantic", "prometheus_client")
_GRACE = 20


class ContenderError(RuntimeError):
    """A process that did not start, answer or go on; the message has the end of its log."""


class Contender:
    """A process and its children; ready some time after it is made.

    Args:
        name: One of ``IMPLEMENTATIONS``.
        command: To run.
        log: File that takes its output.
        vllm: Folder with vLLM for ``PYTHONPATH``, if it is vLLM and has one of its own.
        pipes: Whether bursts and answers go through its stdin and stdout.
    """

    def __init__(
        self, name: str, command: list[str], log: Path, vllm: Path | None, *, pipes: bool
    ) -> None:
        self.name, self._log = name, log
        self._begin = time.monotonic()
        pipe = subprocess.PIPE if pipes else None
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *command],
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or output,
                stderr=output,
                env=_environment(name, vllm),
                start_new_session=True,
                preexec_fn=ends_with_this_process(),
                text=True,
            )
        self.start_seconds: float | None = None

    def await_ready(self, limit: float) -> None:
        """Wait until it takes bursts, at most ``limit`` seconds.

        Raises:
            ContenderError: If it ends or takes longer.
        """
        if self.start_seconds is None:
            self._await(limit)
            self.start_seconds = time.monotonic() - self._begin

    def run(self, burst: Burst, limit: float) -> dict[str, Any]:
        """Figures of a burst.

        Raises:
            ContenderError: If it fails, or takes longer than ``limit`` seconds.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End it and its children, which may take some seconds to free the device."""
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        else:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _await(self, limit: float) -> None:
        raise NotImplementedError

    def _error(self, what: str) -> ContenderError:
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line]
        return ContenderError(" | ".join([f"{self.name} {what}", *errors[-3:], *lines[-3:]]))


class _Worker(Contender):
    """An engine that is driven step by step in another process (``engines.py``)."""

    def __init__(self, name: str, settings: Settings, log: Path, vllm: Path | None) -> None:
        program = "from benchmarks.served.engines import main; main()"
        super().__init__(name, ["-c", program, name, settings.text()], log, vllm, pipes=True)

    def run(self, burst: Burst, limit: float) -> dict[str, Any]:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(asdict(burst)) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._error("has ended") from error
        return self._await(limit)

    def _await(self, limit: float) -> dict[str, Any]:
        """Its next answer."""
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], limit)[0]:
            raise self._error(f"took more than {limit:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._error("has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise self._error(f"failed: {answer['error']}")
        return answer


class _Server(Contender):
    """A server of OpenAI's interface, asked by a client in this process (``streams.py``)."""

    def __init__(self, name: str, settings: Settings, log: Path, folder: Path | None) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self._port = one.getsockname()[1]
        self._model = Path(settings.model).name
        command = server_command(name, settings, self._port, self._model, folder)
        super().__init__(name, command, log, folder, pipes=False)

    def run(self, burst: Burst, limit: float) -> dict[str, Any]:
        try:
            return streams.run(self._port, self._model, burst, limit)
        except (OSError, EOFError, RuntimeError, TimeoutError) as error:
            raise self._error(f"failed: {type(error).__name__}: {error}") from error

    def _await(self, limit: float) -> None:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise self._error("has ended")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2).close()
                return
            time.sleep(0.2)
        raise self._error(f"took more than {limit:.0f} s to start")


def start(name: str, settings: Settings, log: Path, folder: Path | None) -> Contender:
    """Start an implementation; it is not ready yet.

    Args:
        name: One of ``IMPLEMENTATIONS``.
        settings: Of the model.
        log: File that takes its output.
        folder: With vLLM if it is vLLM, with packages that are not installed if it is our server.
    """
    kind = _Server if name.endswith("-server") else _Worker
    return kind(name, settings, log, folder)


def vllm_version(folder: Path | None) -> str:
    """The version of vLLM in a folder, or of the one that is installed; "" if there is none."""
    path = sys.path if folder is None else [str(folder)]
    found = importlib.metadata.Distribution.discover(name="vllm", path=path)
    return next((one.version for one in found), "")


def missing_for_our_server(folder: Path | None) -> list[str]:
    """Packages of our server that are neither installed nor in a folder."""
    path = sys.path if folder is None else [*sys.path, str(folder.resolve())]
    return [name for name in _OUR_SERVER_NEEDS if PathFinder.find_spec(name, path) is None]


def _environment(name: str, vllm: Path | None) -> dict[str, str]:
    """With the checkout on the path; vLLM gets nothing of ours from it where it has a folder."""
    inherited = os.environ.get("PYTHONPATH", "")
    path = [inherited, str(SCRIPTS), str(SCRIPTS.parent)]
    of_vllm = name.startswith("vllm")
    if of_vllm:
        path = [inherited if vllm is None else str(vllm.resolve()), str(SCRIPTS)]
    joined = os.pathsep.join(filter(None, path))
    return {**os.environ, **(_VLLM if of_vllm else {}), "PYTHONPATH": joined}


def server_command(
    name: str, settings: Settings, port: int, model: str, folder: Path | None = None
) -> list[str]:
    """Arguments of Python; of both servers with no line per request."""
    network = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", model]
    if name.startswith("vllm"):
        program = ["-m", "vllm.entrypoints.cli.main", "serve"]
        options = [*_flags(vllm_options(settings)), "--disable-uvicorn-access-log"]
    else:
        program = ["-m", "absorbed_mla.serving.server.cli"]
        if folder is not None:
            program = ["-c", _WITH_FOLDER.format(str(folder.resolve()))]
        options = _flags({name: getattr(settings, name) for name in OUR_OPTIONS})
        options += ["--no-prefix-caching", "--no-access-log"]
        options += ["--cuda-graphs"] if settings.graphs else []
    return [*program, settings.model, *network, *options]


def _flags(options: dict[str, object]) -> list[str]:
    flags = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            flags += [f"--{option}", *map(str, value)]
        else:
            flags += [f"--{option}", str(value)]
    return flags
