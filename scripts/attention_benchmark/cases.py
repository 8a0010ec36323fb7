"""What is measured: layers, and attentions alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

LAYOUTS = ("sbhd", "thd")
FORMS = ("expanded", "absorbed")


@dataclass(frozen=True)
class LayerCase:
    """One attention layer with its projections, and its input.

    Attributes:
        implementation: ``"ours"`` or ``"megatron"``.
        recompute: Whether ``mla_up_proj`` is recomputed in backward.
        heads: Of the layer.
        tokens: Of the sequence or pack.
        layout: ``"sbhd"``, or ``"thd"``: a pack of documents of mixed lengths.
    """

    implementation: str
    recompute: bool
    heads: int
    tokens: int
    layout: str

    # How context_parallel_benchmark's config asks for an exchange of latents: there is none.
    cp_comm_type = None

    def __str__(self) -> str:
        recompute = " recompute" if self.recompute else ""
        return f"{self.implementation}{recompute} n={self.heads} S={self.tokens} {self.layout}"

    @property
    def input(self) -> tuple[int, int, str]:
        """What cases that are compared have in common."""
        return self.heads, self.tokens, self.layout


@dataclass(frozen=True)
class CoreCase:
    """Causal attention of one sequence, without projections.

    Attributes:
        implementation: Who computes it, one of ``core.IMPLEMENTATIONS``.
        form: ``"expanded"`` (keys and values of every head) or ``"absorbed"`` (one latent).
        heads: Query heads.
        tokens: Of the sequence.
    """

    implementation: str
    form: str
    heads: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.implementation} {self.form} n={self.heads} S={self.tokens}"


def document_lengths(tokens: int, seed: int) -> list[int]:
    """Mixed lengths that sum to ``tokens``, the same for the same arguments.

    From single tokens to half of the pack, most of them short.
    """
    draw = random.Random(f"{seed} {tokens}")
    lengths, left = [], tokens
    while left:
        length = min(left, max(1, round(tokens * 0.5 * draw.random() ** 3)))
        lengths.append(length)
        left -= length
    return lengths


def pair_widths(form: str, dims: dict[str, int]) -> tuple[int, int]:
    """Widths of a key and of a value in numbers.

    Args:
        form: One of ``FORMS``.
        dims: The layer's, by the names of ``context_parallel_benchmark.arguments.DIMS``.
    """
    rope = dims["qk-pos-emb-head-dim"]
    if form == "absorbed":
        return dims["kv-lora-rank"] + rope, dims["kv-lora-rank"]
    return dims["qk-head-dim"] + rope, dims["v-head-dim"]


def attention_flops(case: CoreCase, dims: dict[str, int]) -> tuple[float, float]:
    """Floating-point operations of forward and of backward.

    Causal counts half of S^2 pairs. Backward has five products (S, dP, dV, dQ, dK); what a kernel
    computes again counts once.
    """
    key, value = pair_widths(case.form, dims)
    pairs = case.heads * case.tokens**2 / 2
    return pairs * 2 * (key + value), pairs * 2 * (3 * key + 2 * value)
