"""Megatron's ``--moe-layer-freq``: a number, or a list expression such as ``([0]*3+[1]*58)``."""

from __future__ import annotations

import ast


def parse_moe_layer_freq(text: str) -> int | list[int]:
    """Evaluate list literals, ``+`` and ``*``, and nothing else.

    Raises:
        ValueError: If ``text`` is anything else.
    """
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        value = None
    if isinstance(value, int) and value >= 1:
        return value
    if isinstance(value, list) and value and all(x in (0, 1) for x in value):
        return value
    raise ValueError(
        "--moe-layer-freq must be an integer of at least 1 or a list of zeros (dense) and ones "
        f"(MoE) such as ([0]*1+[1]*2); got {text!r}"
    )


def moe_layers(freq: int | list[int], num_layers: int) -> tuple[int, ...]:
    """Per layer 0 (dense) or 1 (MoE); an integer N makes every N-th layer MoE, from the first.

    Raises:
        ValueError: If a list has another length than ``num_layers``.
    """
    if isinstance(freq, int):
        return tuple(int(i % freq == 0) for i in range(num_layers))
    if len(freq) != num_layers:
        raise ValueError(
            f"--moe-layer-freq must have one entry for each of --num-layers {num_layers}, "
            f"got {len(freq)}"
        )
    return tuple(freq)


def _evaluate(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.List(elts=elements):
            return [_evaluate(x) for x in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            left, right = _evaluate(left), _evaluate(right)
            # A typing error should not fill the memory.
            if max((x for x in (left, right) if isinstance(x, int)), default=0) > 10_000:
                raise ValueError("more than 10000 layers")
            return left * right
    raise ValueError(f"unsupported expression {ast.dump(node)}")
