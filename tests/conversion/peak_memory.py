"""How much memory a process really held, measured by the kernel."""

from __future__ import annotations

from pathlib import Path


class PeakMemory:
    """The growth of this process's resident memory, at its peak, since this was made.

    ``getrusage`` cannot tell: a new program starts with the peak of the process that started it.
    """

    def __init__(self) -> None:
        # Makes the peak what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        self._start = self._peak()

    @property
    def growth(self) -> int:
        """Bytes."""
        return self._peak() - self._start

    @staticmethod
    def _peak() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the kernel does not tell the peak of resident memory")
