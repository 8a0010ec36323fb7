"""Reductions over lanes that lie apart, found in the code that Triton's compiler makes.

A layout may hold copies of a small tensor in some of a warp's lanes. Where such lanes lie between
those of an axis, Triton 3.6 reduces the axis over the lanes next to each other, copies among them:
the result is wrong, and no emulation shows it.
"""

from __future__ import annotations

import re

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
