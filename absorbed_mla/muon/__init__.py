"""Orthogonalisation of the K and V up-projections by Muon: combined, split, or by head.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so that its update depends on
which rows are one matrix. Standard MLA has K and V up-projections in one ``linear_kv_up_proj``;
here they are two parameters. The option ``muon_kv_up`` is kept as an attribute of both weights, and
an optimizer that follows it steps on the matrices that the option names instead of on the weights.
"""

from __future__ import annotations

from absorbed_mla.muon.optimizer_hook import follow_kv_up_marks, mark_kv_up
from absorbed_mla.muon.orthogonalization_groups import KVUp

__all__ = ["KVUp", "follow_kv_up_marks", "mark_kv_up"]
