"""Progress bar and log lines of rank 0."""

from __future__ import annotations

import sys


class Progress:
    """A tqdm bar on the terminal with log lines above it; silent on other ranks.

    Args:
        done: Iterations already done.
        total: Iterations of the run.
        enabled: Whether this rank shows anything.
        bar: Whether it shows a bar.
    """

    def __init__(self, done: int, total: int, *, enabled: bool, bar: bool) -> None:
        self._enabled = enabled
        self._bar = None
        # A log file gets the log lines only.
        if enabled and bar and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                self.log("no progress bar: it needs tqdm (pip install tqdm)")
                return
            self._bar = tqdm(initial=done, total=total, unit="it", dynamic_ncols=True)

    def log(self, text: str) -> None:
        """Print a line."""
        if not self._enabled:
            return
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def advance(self, **shown: str) -> None:
        """One more iteration is done."""
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
