"""Barriers that a kernel sets up and never uses, found in the code that Triton's compiler makes.

The compiler gives their memory to other buffers, in which a GPU that processes share can then write
a barrier's first state (``new_barriers`` in kernels/hopper/ring.py). Neither emulation
nor a GPU of one's own shows that.
"""

from __future__ import annotations

import re
from collections import defaultdict

_BARRIERS = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]+xi64,")
# A line's first result, if it has any, and the rest.
_LINE = re.compile(r"\s*(?:(%\w+)[^=]* = )?(.*)")
# The code of a role but the first has names of its own; what it uses is passed to all roles.
_ROLE = re.compile(r"^( *)partition\d+\(.*?^\1\}", re.DOTALL | re.MULTILINE)


def idle_barriers(ttgir: str) -> list[str]:
    """Names of barriers, several or one, of which nothing but ``init_barrier`` makes use."""
    found, uses = [], defaultdict(list)
    for line in _ROLE.sub("", ttgir).splitlines():
        result, operation = _LINE.fullmatch(line).groups()
        if _BARRIERS.match(operation):
            found.append(result)
        for name in re.findall(r"%\w+", operation):
            uses[name].append((result, operation))
    assert found or "init_barrier" not in ttgir, "barriers are set up that are written otherwise"

    def is_idle(name: str) -> bool:
        for result, operation in uses[name]:
            view = operation.startswith("ttg.memdesc_index ")
            if not (is_idle(result) if view else operation.startswith("ttng.init_barrier ")):
                return False
        return True

    return [name for name in found if is_idle(name)]
