"""Megatron's ``moe_layer_freq``: a number, a list, or an expression such as ``([0]*3+[1]*58)``."""

from __future__ import annotations

import ast

from checkpoint_conversion.config_fields import shown

_MOST_LAYERS = 10_000


def parse_moe_layer_freq(freq: object) -> int | list[int]:
    """Read a number or a list; of text, list literals, ``+`` and ``*`` and nothing else.

    Raises:
        ValueError: If ``freq`` is anything else.
    """
    value = freq
    if isinstance(freq, str) and len(freq) <= _MOST_LAYERS:
        try:
            value = _evaluate(ast.parse(freq.strip(), mode="eval").body)
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            value = None
    if type(value) is int and 1 <= value <= _MOST_LAYERS:
        return value
    if isinstance(value, list | tuple) and value and all(type(x) is int for x in value):
        layers = list(value)
        if set(layers) <= {0, 1}:
            return layers
    raise ValueError(
        "--moe-layer-freq must be an integer of at least 1 or a list of zeros (dense) and ones "
        f"(MoE) such as ([0]*1+[1]*2); got {shown(freq)}"
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
            return [_evaluate(x) for x in elements]  # type: ignore[misc]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left) + _evaluate(right)  # type: ignore[operator]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _times(_evaluate(left), _evaluate(right))
    raise ValueError(f"unsupported expression {ast.dump(node)}")


def _times(left: int | list[int], right: int | list[int]) -> int | list[int]:
    sizes = [len(x) if isinstance(x, list) else x for x in (left, right)]
    # A typing error should not fill the memory.
    if sizes[0] * sizes[1] > _MOST_LAYERS:
        raise ValueError(f"more than {_MOST_LAYERS} layers")
    return left * right  # type: ignore[operator,return-value]
