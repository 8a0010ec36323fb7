"""Estimated time of an attention call in either form, from operation counts and measured rates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from absorbed_mla.dims import MLADims
from absorbed_mla.sequences import SequenceLayout


@dataclass(frozen=True)
class Work:
    """Amount of attention work on one rank.

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
        cls,
        layout: SequenceLayout,
        batch: int,
        cp_size: int,
        causal: bool,
        training: bool,
        window: int | None = None,
    ) -> Work:
        """Self-attention over whole sequences, cut evenly over ``cp_size`` ranks.

        Keys are counted on the rank that does most: the first one, which holds a sequence's last
        tokens too and so sees all of it.
        """
        queries = keys = pairs = 0
        for length, base in zip(layout.lengths, layout.bases):
            share = -(-length // cp_size)
            queries, keys = queries + share, keys + length
            seen = share * (length + 1) // 2 if causal else share * length
            seen += share * base
            pairs += seen if window is None else min(seen, share * window)
        return cls(batch * queries, batch * keys, batch * pairs, training)


class Rated(Protocol):
    """Something with measured rates; see ``AttentionBackend.rates``."""

    rates: Mapping[str, tuple[float, float]]


class Operations(NamedTuple):
    """Multiply-adds on one rank.

    Attributes:
        products: Of the matrix products that the form adds outside of the attention.
        forward: Of the attention's forward.
        backward: Of the attention's backward.
    """

    products: int
    forward: int
    backward: int


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


# TFLOP/s in bf16 of the products with what they write (keys and values of 33k tokens and 128 heads
# take 2.06 ms), by GPU. Backends declare their own rates, measured at 8k to 32k tokens
# (docs/attention.md, docs/kernels.md). On other machines operations count, at the same rate.
_PRODUCT_RATES = {"NVIDIA H200": 550.0}


def seconds(form: str, backend: Rated, dims: MLADims, work: Work, machine: str) -> float:
    """Estimated time of one call and its backward; on unknown machines only ratios are meaningful.

    Args:
        form: ``"absorbed"`` or ``"expanded"``.
        backend: Read for its measured rates.
        dims: Of the layer; heads of this rank count.
        work: Amount of work.
        machine: From :func:`machine_name`.
    """
    forward, backward = rates_on(machine, backend)
    count = operations(form, dims, work)
    products = count.products / _PRODUCT_RATES.get(machine, 1.0)
    return 2e-12 * (products + count.forward / forward + count.backward / backward)


# Of the scores that are computed again for the largest ones (measurements/kernels/qk_clip.json).
_SEARCH_RATES = {"NVIDIA H200": 510.0}


def search_seconds(dims: MLADims, work: Work, machine: str) -> float:
    """Estimated time to compute the scores of the expanded form again; see :func:`seconds`.

    That is the most that a search for the largest ones takes (``max_logits.py``).
    """
    products = dims.num_heads_per_rank * work.pairs * dims.qk_head_dim
    return 2e-12 * products / _SEARCH_RATES.get(machine, 1.0)


# Its rates decide between backends that are otherwise equal, as on machines without measurements.
MEASURED_GPU = "NVIDIA H200"


def speed(machine: str, backend: Rated) -> tuple[float, float]:
    """Sorts backends: the forward rate on the machine, then the one on ``MEASURED_GPU``."""
    return rates_on(machine, backend)[0], rates_on(MEASURED_GPU, backend)[0]


def rates_on(machine: str, backend: Rated) -> tuple[float, float]:
    """TFLOP/s forward and backward on a machine; relative ones where it was not measured."""
    kind = "cpu" if machine == "cpu" else "gpu"
    return backend.rates.get(machine, backend.rates.get(kind, (1.0, 1.0)))


# The same processor with other memory: what bounds backends is the same, and their order.
_SAME_PROCESSOR = {"NVIDIA H100 80GB HBM3": MEASURED_GPU}


@functools.cache
def machine_name(device: torch.device) -> str:
    """The name by which backends declare their rates."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    return _SAME_PROCESSOR.get(name, name)
