"""Census: what a process and its engine hold, counted between requests, and what of it grows."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

_PACKAGES = ("absorbed_mla.", "megatron.core.")
_CONTAINERS = (dict, list, set, frozenset, deque, tuple)
_MIB = 2**20
# A table with an entry for each kind of a kernel's launches, whose keys begin with the kernel. It
# fills slowly, and is none if one kernel has more kinds: they would be sizes or requests.
_LAUNCHES, _MOST_KINDS = "absorbed_mla.kernels.launch._prepared", 64
# An entry of it, and how many objects a compiled kernel is made of.
_LAUNCH, _OBJECTS_OF_A_KERNEL = "objects of _Prepared", 150
# As many entries as the last step had rows.
_OF_A_STEP = ("RowLengths.queries", "RowLengths.keys")
# By unit, the growth that is none: in all, and per 1,000 requests. An allocator's memory is never
# quite flat, and tables that have an entry for each size of a step are filled for a long time.
_FLAT = {"MiB": (24.0, 1.0), "MiB allocated": (0.5, 0.02), "": (2, 0.5), "tracked": (500, 25.0)}


def census() -> dict[str, float]:
    """Figures of this process by name, which ends with the unit behind a comma if there is one.

    Memory, file descriptors, threads, objects of our classes and of Megatron's by class, and the
    entries of the containers that they and their modules own, by attribute.
    """
    gc.collect()
    objects = gc.get_objects()
    found = Counter({"objects, tracked": len(objects)})
    ours: dict[type, bool] = {}
    for one in objects:
        if (kind := type(one)) not in ours:
            ours[kind] = str(getattr(kind, "__module__", "")).startswith(_PACKAGES)
        if ours[kind]:
            found[f"objects of {kind.__qualname__}"] += 1
            for name, value in _attributes(one).items():
                _count(found, f"{kind.__qualname__}.{name}", value)
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES):
            for attribute, value in list(vars(module).items()):
                if not attribute.startswith("__"):
                    _count(found, f"{name}.{attribute}", value)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found["resident memory, MiB"] = pages * os.sysconf("SC_PAGE_SIZE") / _MIB
    found["file descriptors"] = len(os.listdir("/proc/self/fd"))
    found["threads"] = len(os.listdir("/proc/self/task"))
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        found["CUDA memory, MiB allocated"] = torch.cuda.memory_allocated() / _MIB
        found["CUDA memory reserved, MiB"] = torch.cuda.memory_reserved() / _MIB
    return dict(found)


def _attributes(one: object) -> dict[str, object]:
    slots = (name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
    found = {name: getattr(one, name, None) for name in slots}
    return {**found, **getattr(one, "__dict__", {})}


def _count(found: Counter, name: str, value: object, depth: int = 3) -> None:
    """Add a container's entries, and those of the containers in it."""
    if name == _LAUNCHES and isinstance(value, Mapping):
        kinds = Counter(kernel for kernel, *_ in value)
        found[f"{name}: kernels"] = len(kinds)
        found[f"{name}: kinds of one kernel"] = max([_MOST_KINDS, *kinds.values()])
    elif isinstance(value, _CONTAINERS):
        found[name] += len(value)
        for inner in list(value.values() if isinstance(value, Mapping) else value):
            if depth and isinstance(inner, _CONTAINERS):
                _count(found, f"{name}[]", inner, depth - 1)
    elif isinstance(value, functools._lru_cache_wrapper):
        found[name] += value.cache_info().currsize


def growth(requests: Sequence[int], figures: Sequence[Mapping[str, float]]) -> list[str]:
    """What grows with the requests, after the first third of them, a line for each.

    It grows if its least value in the second half of the rest is above the largest in the first
    half, and a line through all values rises, both by more than is flat; and if it rises from the
    second to the last third of the rest by at least half of what it rose before: tables of what
    can come rise ever less.

    Args:
        requests: That had ended when the figures were counted.
        figures: Of :func:`census`.
    """
    start = len(requests) // 3
    places, figures = [n / 1000 for n in requests[start:]], figures[start:]
    half, lines = len(places) // 2, []
    if half < 2:
        return []
    for name in sorted({name for one in figures for name in one}):
        values = [one.get(name, 0) for one in figures]
        most, slope = _FLAT[name.partition(", ")[2]]
        if min(values[half:]) - max(values[:half]) <= most or _saturates(values):
            continue
        rises = _slope(places, values)
        if name == "objects, tracked":
            launches = [one.get(_LAUNCH, 0) for one in figures]
            slope += _OBJECTS_OF_A_KERNEL * max(0, _slope(places, launches))
        if rises > slope and name not in (_LAUNCH, *_OF_A_STEP):
            lines.append(
                f"{name}: {values[0]:.10g}, ..., {values[-1]:.10g}: {rises:.3g} more with 1,000 "
                f"requests, of which {slope:g} would be flat"
            )
    return lines


def _slope(places: Sequence[float], values: Sequence[float]) -> float:
    return statistics.linear_regression(places, values).slope


def _saturates(values: Sequence[float]) -> bool:
    third = len(values) // 3
    if third == 0:
        return False
    first, last = (statistics.median(part) for part in (values[:third], values[-third:]))
    middle = statistics.median(values[third:-third])
    return last - middle < (middle - first) / 2
