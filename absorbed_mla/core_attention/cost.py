"""What an attention call costs in either form, by operations and by measured rates."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from absorbed_mla.dims import MLADims
from absorbed_mla.sequences import SequenceLayout


@dataclass(frozen=True)
class Work:
    """What one rank has to attend to.

    Attributes:
        query_tokens: Queries of this rank.
        key_tokens: Keys that this rank's queries see.
        pairs: Pairs of a query and a key that it sees.
        training: Whether a backward follows.
    """

    query_tokens: int
    key_tokens: int
    pairs: int
    training: bool

    @classmethod
    def of(
        cls, layout: SequenceLayout, batch: int, cp_size: int, causal: bool, training: bool
    ) -> Work:
        """Self-attention over whole sequences, cut evenly over ``cp_size`` ranks.

        Keys are counted on the rank that does most: the first one, which holds a sequence's last
        tokens too and so sees all of it.
        """
        queries = keys = pairs = 0
        for length in layout.lengths:
            share = -(-length // cp_size)
            queries, keys = queries + share, keys + length
            pairs += share * (length + 1) // 2 if causal else share * length
        return cls(batch * queries, batch * keys, batch * pairs, training)


@dataclass(frozen=True)
class Operations:
    """Multiply-adds on one rank.

    Attributes:
        products: Of matrix products outside of the attention that the form adds.
        forward: Of attention, forward.
        backward: Of attention, backward.
    """

    products: int
    forward: int
    backward: int

    @property
    def total(self) -> int:
        """All together."""
        return self.products + self.forward + self.backward


def operations(form: str, dims: MLADims, work: Work) -> Operations:
    """Multiply-adds of the attention and of what a form adds to it, on one rank.

    Absorbing costs ``C (nope + v)`` for each query and head, and twice that in backward. Expanding
    costs that for each key, in forward, again in backward because keys and values are not kept, and
    twice for the gradients, with k_rope's handed through these products (``expansion.py``). A pair
    of query and key costs the widths of key and value in forward; backward has five products where
    forward has two.
    """
    c, rope, heads = dims.kv_lora_rank, dims.qk_rope_head_dim, dims.num_heads_per_rank
    projection = c * (dims.qk_nope_head_dim + dims.v_head_dim)
    if form == "absorbed":
        key, value = c + rope, c
        products = work.query_tokens * projection * (3 if work.training else 1)
    else:
        key, value = dims.qk_head_dim, dims.v_head_dim
        gradients = 2 * (projection + rope * (c + dims.qk_head_dim))
        each = 2 * projection + gradients if work.training else projection
        products = work.key_tokens * each
    pairs = heads * work.pairs
    backward = pairs * (3 * key + 2 * value) if work.training else 0
    return Operations(heads * products, pairs * (key + value), backward)


# TFLOP/s in bf16: products with what they write (keys and values of 33k tokens and 128 heads take
# 2.06 ms); then forward and backward of attention by backend, at 8k to 32k tokens
# (docs/attention.md, docs/kernels.md; "reference" is a guess, "flash_attention_3" has been tested
# but not timed here: its forward is what others measured). Every backend needs a row.
_MEASURED: dict[str, dict[str, tuple[float, float]]] = {
    "NVIDIA H200": {
        "products": (550.0, 550.0),
        "flash_attention_4": (740.0, 470.0),
        "cudnn": (590.0, 460.0),
        "transformer_engine": (585.0, 455.0),
        "flash_attention_3": (600.0, 410.0),
        "flash_mla": (570.0, 570.0),  # over cached latents (docs/inference.md)
        "hopper": (640.0, 415.0),
        "triton": (295.0, 170.0),
        "reference": (15.0, 15.0),
    }
}
# Elsewhere operations count, but for plain PyTorch, which is slow on a GPU, and for kernels in an
# interpreter. Deterministic algorithms are not asked about: they change what "hopper" costs.
_GPU = {"reference": (0.05, 0.05)}
_CPU = {"triton": (1e-6, 1e-6)}


def seconds(form: str, backend: str, dims: MLADims, work: Work, machine: str) -> float:
    """Estimated time of one call and its backward; only ratios mean anything on unknown machines.

    Args:
        form: ``"absorbed"`` or ``"expanded"``.
        backend: Name of the backend.
        dims: Of the layer; heads of this rank count.
        work: What there is to do.
        machine: From :func:`machine_name`.
    """
    rates = _MEASURED.get(machine, _CPU if machine == "cpu" else _GPU)
    products, _ = rates.get("products", (1.0, 1.0))
    known = rates[backend] if machine in _MEASURED else rates.get(backend, (1.0, 1.0))
    forward, backward = known
    count = operations(form, dims, work)
    time = count.products / products + count.forward / forward + count.backward / backward
    return 2e-12 * time


@functools.cache
def machine_name(device: torch.device) -> str:
    """What :func:`seconds` knows rates of, by name."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
