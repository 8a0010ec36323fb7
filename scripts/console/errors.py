"""Print an error as one line, once, whether one rank fails or all of them do.

torchrun gives each process an error file for the reason of its failure. Local rank 0 prints its
error. The other ranks of the machine wait for its error file, and then exit silently with code 0,
so that torchrun's report, which a script cannot switch off, names one process and one reason.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from console.ranks import error_file, local_rank, rank

# Seconds. Before the process group exists, ranks may be seconds apart because imports take that
# long; afterwards collectives keep them together.
_WAIT_FOR_FIRST, _WAIT_FOR_FIRST_JOINED = 30.0, 5.0
_WAIT_FOR_OTHERS, _WAIT_FOR_OTHERS_JOINED = 5.0, 2.0
_TIME_TO_EXIT = 0.2
_POLL = 0.05


def follow_the_first() -> None:
    """Exit silently when local rank 0 fails before the process group exists.

    Local rank 0 checks some things for all, such as whether output files can be written. A thread
    watches its error file.
    """
    own, first = error_file(local_rank()), error_file(0)
    if not (own and first and local_rank()):
        return

    def watch() -> None:
        while not _joined():
            if _appears(first, _POLL) and not _joined():
                _write(own, "local rank 0 reports the error")
                _exit_silently()

    threading.Thread(target=watch, daemon=True).start()


def report(script: str, message: str, code: int) -> int:
    """Print an error unless local rank 0 prints its own.

    Args:
        script: Name of the program.
        message: What is wrong; printed as one line.
        code: Exit code of the process.

    Returns:
        ``code``. A process that leaves the error to local rank 0 exits here.
    """
    where = f" (rank {rank()})" if rank() else ""
    line = f"{script}: error{where}: {' '.join(message.split())}"
    own, first = error_file(local_rank()), error_file(0)
    if own and first:
        _write(own, line)
        if not local_rank():
            _print(line)
            _wait_for_others()
            return code
        if _appears(first, _WAIT_FOR_FIRST_JOINED if _joined() else _WAIT_FOR_FIRST):
            _exit_silently()
    elif rank():
        # The launcher ends this process as soon as rank 0 has failed.
        time.sleep(_WAIT_FOR_FIRST_JOINED)
    _print(line)
    return code


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(path: Path, line: str) -> None:
    """Write an error file in torchrun's format, atomically because other ranks wait for it."""
    details = {"py_callstack": line, "timestamp": str(int(time.time()))}
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
    part.replace(path)


def _wait_for_others() -> None:
    """Give ranks with the same error time to exit before torchrun ends and reports them."""
    others = [error_file(n) for n in range(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))]
    seconds = _WAIT_FOR_OTHERS_JOINED if _joined() else _WAIT_FOR_OTHERS
    deadline = time.monotonic() + seconds
    for path in filter(None, others):
        _appears(path, deadline - time.monotonic())
    if others:
        time.sleep(_TIME_TO_EXIT)


def _appears(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _joined() -> bool:
    """Whether this process has joined the process group."""
    # Read from sys.modules: importing torch takes seconds, and may be under way in another thread.
    module = sys.modules.get("torch.distributed.distributed_c10d")
    is_initialized = getattr(module, "is_initialized", None)
    return is_initialized is not None and is_initialized()


def _exit_silently() -> None:
    sys.stdout.flush()
    # sys.exit would run exit handlers, which may wait for ranks that have exited.
    os._exit(0)
