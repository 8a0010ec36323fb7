"""Progress of a conversion: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from typing import Any, TextIO

# Seconds between two lines where there is no terminal.
_INTERVAL = 10.0


class Reporter:
    """Receives progress from several threads; this base class ignores it."""

    def start(self, total: int, done: int) -> None:
        """Begin.

        Args:
            total: Bytes of the whole conversion.
            done: Bytes that are written already, when resuming.
        """

    def advance(self, nbytes: int) -> None:
        """Count ``nbytes`` more as written."""

    def say(self, text: str) -> None:
        """Print a message."""

    def finish(self) -> None:
        """End, after success or failure."""


class LineReporter(Reporter):
    """Prints a line every 10 seconds, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._total = self._done = self._begun_with = 0
        self._started = self._last = 0.0

    def start(self, total: int, done: int) -> None:
        """See the base class."""
        self._total, self._done, self._begun_with = total, done, done
        self._started = self._last = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """See the base class."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._last < _INTERVAL:
                return
            self._last = now
            speed = (self._done - self._begun_with) / (now - self._started)
        left = (self._total - self._done) / speed
        self.say(
            f"{format_bytes(self._done)} of {format_bytes(self._total)}, "
            f"{format_bytes(speed)}/s, {left:.0f} s left"
        )

    def say(self, text: str) -> None:
        """See the base class."""
        print(text, file=self._stream, flush=True)


class BarReporter(Reporter):
    """A progress bar with bytes per second and the time that is left."""

    def __init__(self, stream: TextIO) -> None:
        from rich import console, progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console.Console(file=stream),
        )
        self._task: Any = None

    def start(self, total: int, done: int) -> None:
        """See the base class."""
        self._task = self._bar.add_task("converting", total=total, completed=done)
        self._bar.start()

    def advance(self, nbytes: int) -> None:
        """See the base class."""
        self._bar.advance(self._task, nbytes)

    def say(self, text: str) -> None:
        """See the base class."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def finish(self) -> None:
        """See the base class."""
        self._bar.stop()


def reporter_for(stream: TextIO | None = None) -> Reporter:
    """A bar on a terminal if rich is installed, lines otherwise; ``stream`` None is stderr."""
    stream = stream or sys.stderr
    bar = stream.isatty() and importlib.util.find_spec("rich") is not None
    return BarReporter(stream) if bar else LineReporter(stream)


def format_bytes(count: float) -> str:
    """A size with a unit, in powers of 1000: ``"1.5 GB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
