"""A runner in processes of its own, one for each tensor-parallel rank."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from absorbed_mla.serving.executor.commands import Command
from absorbed_mla.serving.llm_engine import interrupts_deferred
from absorbed_mla.serving.llm_options import LLMOptions

if TYPE_CHECKING:
    from absorbed_mla.serving.engine_options import EngineOptions
    from absorbed_mla.serving.executor.weight_updates import UpdateFailure
    from absorbed_mla.serving.request_results import Progress
    from absorbed_mla.serving.statistics import Statistics

# Seconds that processes have to end by themselves.
_GRACE = 10
# Seconds that a killed process may take to disappear after its peers have lost their connections.
_LAST_BREATH = 1
_LAST_LINES = 20


class EngineDeadError(RuntimeError):
    """A process of the model has ended; nothing can be generated any more."""


class ProcessRunner:
    """Starts one process per rank; each has a ``LocalRunner`` and makes the calls of this one.

    No part of the caller's program runs in them, so scripts need no ``__main__`` guard, and
    notebooks work.

    Args:
        folder: The checkpoint.
        options: With ``tensor_parallel_size`` set.
        meanwhile: Called here while the processes load the model; they end if it raises.

    Raises:
        ValueError: If checkpoint, options and machine do not fit each other.
        EngineDeadError: If a process ends before the model is loaded.
    """

    def __init__(
        self, folder: Path, options: LLMOptions, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        self._world = options.num_processes
        self._keeps_prefixes = options.prefix_cache_dir is not None
        self._meeting = tempfile.TemporaryDirectory(prefix="absorbed_mla_")
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        atexit.register(self.close)
        try:
            for rank in range(self._world):
                self._start(rank)
            for rank, connection in enumerate(self._connections):
                self._send(connection, (folder, options, rank, self._world, self._store()))
            # Megatron, which the answers need, is imported here while the processes do the same.
            import_module("absorbed_mla.serving.executor.local")
            meanwhile()
            self._collect()
        except BaseException:
            self._kill()
            raise

    def step(self, commands: Sequence[Command]) -> list[Progress]:
        """See ``Runner``."""
        return self._call("step", commands)

    def sleep(self, level: int = 1) -> None:
        """See ``Runner``."""
        self._call("sleep", level)

    def wake(self) -> None:
        """See ``Runner``."""
        self._call("wake")

    def update_weights(
        self, weights: Any, keep_cache: bool, rank_offset: int, timeout: float
    ) -> UpdateFailure | None:
        """See ``Runner``; weights of this process go through memory that all processes share."""
        from absorbed_mla.serving.weights.transfer import BUCKET_BYTES, Sender

        if isinstance(weights, str):
            return self._call("update_weights", weights, keep_cache, rank_offset, timeout)
        shapes, device = weights.shapes, weights.device

        def ended() -> str:
            over = answer is not None and answer.done()
            return "the processes of the model do not receive any more" if over else ""

        answer: Future | None = None
        sender = Sender(
            "tcp://127.0.0.1:0",
            self._world,
            backend="shared_memory",
            bucket_bytes=BUCKET_BYTES,
            timeout=timeout,
            ended=ended,
        )
        with ThreadPoolExecutor(1) as threads:
            asked = (sender.address, keep_cache, 1, timeout)
            answer = threads.submit(self._call, "update_weights", *asked)
            try:
                sender.send(shapes, lambda: weights, device)
            except Exception:
                # The processes say why, or what they were told.
                if answer.result() is None:
                    raise
            return answer.result()

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """See ``Runner``."""
        return self._call("reset_prefix_cache", reset_running_requests)

    def options(self) -> EngineOptions:
        """See ``Runner``."""
        return self._call("options")

    def statistics(self) -> Statistics:
        """See ``Runner``."""
        return self._call("statistics")

    def require_no_leak(self) -> None:
        """See ``Runner``."""
        self._call("require_no_leak")

    def check(self) -> None:
        """See ``Runner``.

        Raises:
            EngineDeadError: If a process has ended.
        """
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                self._die(rank)
        self._require_alive()

    def silence(self) -> float:
        """See ``Runner``: since the oldest heartbeat, which is the time of a rank's log."""
        try:
            beats = [self._log(rank).stat().st_mtime for rank in range(self._world)]
        except FileNotFoundError:
            return 0.0  # closed meanwhile
        return time.time() - min(beats)

    def close(self) -> None:
        """End the processes; may be called twice.

        Where the prefix cache outlives them, they write it first.
        """
        if self._keeps_prefixes and self._processes:
            with contextlib.suppress(EngineDeadError):
                self.sleep(0)
        self._end()

    def _end(self) -> None:
        """End the processes, whatever they do."""
        atexit.unregister(self.close)
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._processes = [], []
        self._meeting.cleanup()

    def process_ids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._processes]

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        environment = {
            **os.environ,
            # Packages that the caller imports from folders are found there, too.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),
        }
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        threads = max(1, (os.cpu_count() or 1) // self._world)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        with theirs, self._log(rank).open("wb") as log:
            descriptor = str(theirs.fileno())
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "absorbed_mla.serving.executor.worker",
                    descriptor,
                    self._meeting.name,
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        self._connections.append(ours)

    def _store(self) -> str:
        return str(Path(self._meeting.name) / "store")

    def _log(self, rank: int) -> Path:
        return Path(self._meeting.name) / f"rank{rank}.log"

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a method on every rank; returns what rank 0 returned."""
        return self.each(name, [arguments] * self._world)[0]

    def each(self, name: str, arguments: Sequence[tuple]) -> list[Any]:
        """Call a method on every rank, with arguments of its own; returns the answers by rank."""
        self._require_alive()
        # Ctrl-C leaves no answers behind that would be taken for later ones.
        with interrupts_deferred():
            try:
                for connection, own in zip(self._connections, arguments, strict=True):
                    self._send(connection, (name, own))
                return self._collect()
            except BaseException:
                self._kill()
                raise

    def _require_alive(self) -> None:
        if not self._processes:
            raise EngineDeadError("the processes of the model have ended")

    def _send(self, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._die(self._connections.index(connection))

    def _collect(self) -> list[Any]:
        """Wait for the answers of all ranks; the first error is raised."""
        answers: list[Any] = [None] * self._world
        missing = dict(zip(self._connections, range(self._world)))
        while missing:
            for connection in wait(list(missing)):
                rank = missing.pop(connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._die(rank)
                if kind == "error":
                    self._fail(rank, value)
                answers[rank] = value
        return answers

    def _fail(self, rank: int, error: Exception) -> NoReturn:
        """Raise the error of a rank, unless it is the consequence of another rank's end."""
        end = time.monotonic() + (0 if isinstance(error, ValueError) else _LAST_BREATH)
        ended: list[int] = []
        while not ended and time.monotonic() < end:
            # Ranks that have reported an error leave with 0.
            others = enumerate(self._processes)
            ended = [other for other, process in others if process.poll() and other != rank]
            time.sleep(0.01)
        if ended:
            self._die(ended[0])
        # The other ranks may wait for this one for ever.
        self._kill()
        raise error

    def _die(self, rank: int) -> NoReturn:
        """Raise why a rank has ended: the error that it has reported, or its last lines.

        A ValueError of another rank is no consequence of this end, but may be its cause.
        """
        for other in (rank, *range(self._world)):
            error = self._reported(other)
            if isinstance(error, ValueError) or (other == rank and error is not None):
                self._fail(other, error)
        process = self._processes[rank]
        try:
            code = process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            code = None
        lines = self._log(rank).read_text(errors="replace").splitlines()[-_LAST_LINES:]
        self._kill()
        raise EngineDeadError(
            f"the process of rank {rank} has ended with code {code}; its last lines:\n"
            + "\n".join(lines)
        )

    def _reported(self, rank: int) -> Exception | None:
        """The error that a rank wrote before it ended, if that was not read yet."""
        connection = self._connections[rank]
        with contextlib.suppress(EOFError, OSError):
            while connection.poll():
                kind, value = connection.recv()
                if kind == "error":
                    return value
        return None

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._end()


def picklable(error: Exception) -> Exception:
    """The error itself if it survives a pipe, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
