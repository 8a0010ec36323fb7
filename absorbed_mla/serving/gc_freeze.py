"""gc freeze: takes what is loaded out of Python's garbage collection in serving processes."""

from __future__ import annotations

import gc


def leave_out_what_is_there() -> None:
    """Let collections look at what is made from now on only.

    A full one would otherwise look at all that was imported, half a million objects, which takes
    tenths of a second amid steps. For processes of our own: it is the whole process's.
    """
    gc.collect()
    gc.freeze()
