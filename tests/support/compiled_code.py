"""Mistakes in the code that Triton's compiler makes, which no emulation shows.

* Barriers that a kernel sets up and never uses. The compiler gives their memory to other buffers,
  in which a GPU that processes share can then write a barrier's first state (``new_barriers`` in
  kernels/hopper/ring.py).
* Reductions over lanes that lie apart. A layout may hold copies of a small tensor in some of a
  warp's lanes. Where such lanes lie between those of an axis, Triton 3.6 reduces the axis over the
  lanes next to each other, copies among them.
"""

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


_LAYOUT = re.compile(r"^(#\w+) = #ttg\.linear<\{.*?\blane = (\[.*?\]), warp = ", re.MULTILINE)
_REDUCTION = re.compile(r'\s*(%\w+)[^=]* = "tt\.reduce".*<\{axis = (\d+) : i32\}>')
# The operands' type stands behind the region that combines two numbers.
_OPERAND = re.compile(r"\s*\}\) : \(tensor<[^,]*, (#[\w.]+)")


def reduced_across_copies(ttgir: str) -> list[str]:
    """Names of results of reductions over an axis whose lanes lie apart."""
    lanes = {
        name: [[int(step) for step in step.split(",")] for step in re.findall(r"\[([\d, ]+)\]", of)]
        for name, of in _LAYOUT.findall(ttgir)
    }
    found, reduction = [], None
    for line in ttgir.splitlines():
        reduction = _REDUCTION.match(line) or reduction
        if reduction and (operand := _OPERAND.match(line)):
            result, axis = reduction.groups()
            if _lie_apart([step[int(axis)] != 0 for step in lanes.get(operand[1], [])]):
                found.append(result)
            reduction = None
    return found


def _lie_apart(moves: list[bool]) -> bool:
    """Whether bits of the lane's number that move along the axis have others between them."""
    bits = [bit for bit, moving in enumerate(moves) if moving]
    return bool(bits) and bits[-1] - bits[0] >= len(bits)
