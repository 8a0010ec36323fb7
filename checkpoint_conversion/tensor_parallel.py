"""How tensor-parallel ranks split each tensor of a Megatron model, by its name."""

from __future__ import annotations

import re

from checkpoint_conversion import layouts, mapping_table
from checkpoint_conversion.transforms import (
    COLUMNS,
    GATED_ROWS,
    REPLICATED,
    ROWS,
    Rule,
    same_values,
)

__all__ = [
    "COLUMNS",
    "GATED_ROWS",
    "REPLICATED",
    "ROWS",
    "Rule",
    "same_values",
    "tensor_parallel_rule",
]

_PREFIX = re.compile(r"(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.(transformer_layer\.)?)?")
_RULES = {
    row.megatron: row.split
    for row in (*mapping_table.MODEL, *mapping_table.LAYER, *mapping_table.MTP)
}


def tensor_parallel_rule(name: str) -> Rule | None:
    """How ranks split the tensor called ``name``, in any layout; None for an unknown name.

    Down-projections count as replicated, as in TransformerEngine's layers; local layers split their
    rows instead.
    """
    prefix = _PREFIX.match(name)
    inner = name[prefix.end() :] if prefix else name
    rule = _RULES.get(re.sub(r"local_experts\.\d+\.", "local_experts.{expert}.", inner))
    # Weights that a layout renames, joins or splits are shared like those of the table.
    return rule or _RULES.get(layouts.default_name(inner) or "")
