"""Routed experts that a rank keeps together: Megatron's former ``GroupedMLP``.

It had two parameters for all E experts of a rank, transposed, and viewed as

    mlp.experts.weight1   [hidden, E * 2 * I]   ->  [E, hidden, 2 * I], columns [gate, up]
    mlp.experts.weight2   [E * I, hidden]       ->  [E, I, hidden]

where I is the rank's share of an expert's width. Every expert is a block of consecutive bytes.
(TransformerEngine's grouped experts have a weight of their own each; ``legacy_names.py``.)
"""

from __future__ import annotations

import math
import re

from checkpoint_conversion.formats.pt_file import StoredTensor
from checkpoint_conversion.lazy_tensor import LazyTensor

_GROUPED_MLP = re.compile(r"(.*mlp\.experts\.)weight([12])")


def is_grouped_mlp(name: str) -> bool:
    """Whether a tensor holds all experts of a rank."""
    return _GROUPED_MLP.fullmatch(name) is not None


def split_grouped_mlp(
    name: str, stored: StoredTensor, leaf: str, experts: int, hidden: int
) -> dict[str, LazyTensor] | None:
    """The experts of a rank under the names of sequential experts.

    Args:
        name: Of the parameter.
        stored: The parameter.
        leaf: What the result is made of.
        experts: That the rank has.
        hidden: The model's width.

    Returns:
        None if the parameter's shape does not fit.
    """
    match = _GROUPED_MLP.fullmatch(name)
    assert match is not None
    first = match[2] == "1"
    per_expert = math.prod(stored.shape) // max(1, experts * hidden)
    expected = (hidden, experts * per_expert) if first else (experts * per_expert, hidden)
    if stored.shape != expected or not per_expert or not stored.is_contiguous:
        return None
    block = (hidden, per_expert) if first else (per_expert, hidden)
    lazy = stored.view(experts, *block).lazy(leaf)
    return {
        f"{match[1]}local_experts.{expert}.linear_fc{match[2]}.weight": lazy.narrow(
            0, expert, 1
        ).map(lambda values: values[0].t().contiguous(), shape=block[::-1])
        for expert in range(experts)
    }
