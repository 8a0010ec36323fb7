"""Start ranks as torchrun does, forked from a process that has imported PyTorch and Megatron.

PyTorch and Megatron take a process five seconds of a core to import, more than most tests run for.
This module imports them once for all ranks of a job, and with ``--serve`` once for many jobs::

    python -m tests.support.forked 4 -m pytest tests/distributed

Ranks of pytest are forked when the tests are collected, which takes longer than those imports.
Only for machines without a GPU.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from console.parent import ends_with_this_process
from tests.support.gloo import share_one_device

IMPORTS = (
    "torch._dynamo",  # by torch.compiler.disable: as long as all of the package
    "torch.distributed.checkpoint",
    "torch.testing",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
)
_POLL = 0.02


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program of one or more ranks.

    Attributes:
        argv: Command line after "python": a script, or -m and a module; then arguments.
        ranks: Number of processes; 0: one process without torchrun's variables.
        folder: Working directory.
        outputs: For each rank the files of stdout and stderr; None: those of this process.
        grace: Seconds until the other ranks are killed after one has failed.
        timeout: Seconds until all ranks are killed.
    """

    argv: list[str]
    ranks: int = 0
    folder: str = "."
    outputs: list[list[str]] | None = None
    grace: float = 10.0
    timeout: float = float("inf")


def run(job: Job) -> list[int | None]:
    """Run a job to its end.

    Returns:
        Exit codes by rank: minus the number of the signal that ended it; None if killed here.
    """
    running = []
    port = 0
    if job.ranks:
        store, port = start_store()
        running.append(store)
    try:
        ranks = [_fork(_rank_main, job, rank, port) for rank in range(job.ranks or 1)]
        return wait(ranks, job.grace, job.timeout)
    finally:
        _kill(running)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _rank_main(job: Job, rank: int, port: int) -> None:
    if job.ranks:
        os.environ.update(of_the_job(job.ranks, port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(job.folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in enumerate(job.outputs[rank] if job.outputs else (), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    if job.argv[0] == "-m":
        sys.argv = job.argv[1:]
        runpy.run_module(job.argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(job.argv)
        sys.path[0] = str(Path(job.argv[0]).parent)
        runpy.run_path(job.argv[0], run_name="__main__")


def of_the_job(ranks: int, port: int) -> dict[str, str]:
    """Torchrun's variables that all ranks have in common."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def start_store() -> tuple[int, int]:
    """Start the TCPStore of the ranks in a process of its own; returns its process id and port."""
    ours, its = socket.socketpair()
    pid = _fork(_store_main, its)
    return pid, int(ours.recv(16))


def _store_main(connection: socket.socket) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(str(store.port).encode())
    signal.pause()


def _fork(main, *arguments) -> int:
    """Call ``main`` in a forked process that exits as Python does; returns its process id."""
    sys.stdout.flush()
    bind = ends_with_this_process()
    pid = os.fork()
    if not pid:
        bind()
        leave(main, *arguments)
    return pid


def leave(main, *arguments) -> NoReturn:
    """Call ``main`` in a forked process, and exit as Python does."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        main(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int], grace: float, timeout: float) -> list[int | None]:
    """Exit codes, when all have ended; they are killed if this is interrupted."""
    codes: dict[int, int | None] = {}
    late: set[int] = set()
    deadline = time.monotonic() + timeout
    try:
        while len(codes) < len(pids):
            for pid in set(pids) - set(codes):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = None if pid in late else os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        deadline = min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                late = set(pids) - set(codes)
                for pid in late:
                    os.kill(pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(_POLL)
    finally:
        _kill(set(pids) - set(codes))
    return [codes[pid] for pid in pids]


def serve() -> None:
    """Run jobs from stdin, one line of JSON each; print the exit codes of each as JSON."""
    for line in sys.stdin:
        print(json.dumps(run(Job(**json.loads(line)))), flush=True)


def prepare(*modules: str) -> None:
    """Import what programs need, and these modules, to be shared with all that are forked."""
    gc.disable()  # there is no garbage in what is imported
    import torch

    # As absorbed_mla.cpu_host does it, which programs import themselves.
    plain = lambda model=None, **_: (lambda function: function) if model is None else model  # noqa: E731
    with mock.patch.object(torch, "compile", plain):
        for name in (*IMPORTS, *modules):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    share_one_device()


def main(arguments: list[str]) -> int:
    """``RANKS PROGRAM [ARGUMENT...]``, or ``--serve [MODULE...]`` to import those modules too."""
    serving = arguments[0] == "--serve"
    prepare(*(arguments[1:] if serving else ()))
    # Otherwise the ranks would outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if serving:
        return serve() or 0
    ranks, *argv = arguments
    if argv[:2] == ["-m", "pytest"]:
        # Programs that are forked have not imported pytest.
        from tests.support.ranks import run_tests

        leave(run_tests, argv[2:], int(ranks))
    return exit_code(run(Job(argv=argv, ranks=int(ranks))))


def exit_code(codes: list[int | None]) -> int:
    """Of all ranks; says which ones were ended."""
    for rank, code in enumerate(codes):
        if code is None or code < 0:
            print(f"[rank {rank}] {_end_of(code)}", file=sys.stderr)
    return int(any(codes) or None in codes)


def _end_of(code: int | None) -> str:
    """What ended a rank that did not exit by itself; the other ranks only see it gone."""
    if code is None:
        return "was killed, because it went on after another rank had failed"
    return f"was ended by {signal.Signals(-code).name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
