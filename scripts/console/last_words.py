"""An error in one line, said once, whether one process has it or all of them.

Under torchrun every process of a machine that fails writes the reason to its error file. The first
one prints it; the others see its file, and end silently and with 0, so that torchrun's own report,
which cannot be switched off, names one process and the reason.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from console.ranks import error_file, local_rank, rank

# How long another process waits for the first one to fail, too, and the first one for the others
# to see that: imports take some longer than others, but after them they wait for each other.
_BEFORE_MEETING, _AFTER_MEETING = 30.0, 5.0
_FOR_OTHERS_BEFORE, _FOR_OTHERS_AFTER = 5.0, 2.0
_TO_END = 0.2
_POLL = 0.05


def follow_the_first() -> None:
    """End this process silently if the first one of its machine fails before they have met.

    It may check what is its to check alone, such as files that it will write.
    """
    own, first = error_file(local_rank()), error_file(0)
    if not (own and first and local_rank()):
        return

    def watch() -> None:
        while not _have_met():
            if _appears(first, _POLL) and not _have_met():
                _write(own, "the first process of this machine says what is wrong")
                _end_silently()

    threading.Thread(target=watch, daemon=True).start()


def report(script: str, message: str, code: int) -> int:
    """Print an error once: the first process's, or another's if the first does not have it.

    Args:
        script: Name of the program.
        message: What is wrong; made one line.
        code: What the process is to end with.

    Returns:
        ``code``. A process whose error another one prints does not return.
    """
    where = f" (rank {rank()})" if rank() else ""
    line = f"{script}: error{where}: {' '.join(message.split())}"
    own, first = error_file(local_rank()), error_file(0)
    if own and first:
        _write(own, line)
        if local_rank():
            if _appears(first, _AFTER_MEETING if _have_met() else _BEFORE_MEETING):
                _end_silently()
        else:
            _say(line)
            _wait_for_others()
            return code
    elif rank():
        # The launcher ends this process as soon as the first one has failed.
        time.sleep(_AFTER_MEETING)
    _say(line)
    return code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(path: Path, line: str) -> None:
    """In torchrun's format; the whole file at once, because others read it."""
    details = {"py_callstack": line, "timestamp": str(int(time.time()))}
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
    part.replace(path)


def _wait_for_others() -> None:
    """Let those that have the error, too, end before torchrun ends them and reports it."""
    others = [error_file(n) for n in range(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))]
    seconds = _FOR_OTHERS_AFTER if _have_met() else _FOR_OTHERS_BEFORE
    deadline = time.monotonic() + seconds
    for path in filter(None, others):
        _appears(path, deadline - time.monotonic())
    if others:
        time.sleep(_TO_END)


def _appears(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _have_met() -> bool:
    """Whether this process has joined the others."""
    # Not imported for this, and perhaps only half imported.
    module = sys.modules.get("torch.distributed.distributed_c10d")
    joined = getattr(module, "is_initialized", None)
    return joined is not None and joined()


def _end_silently() -> None:
    sys.stdout.flush()
    # Not by way of the interpreter's end, which may wait for processes that have ended.
    os._exit(0)
