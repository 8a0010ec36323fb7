"""How much memory this process has resident."""

from __future__ import annotations

import os
import resource


def resident() -> int:
    """Bytes now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident() -> int:
    """Bytes at most so far."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Elsewhere; on Linux it would begin with what the process had before it became this program.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
