"""Fuzz families of dense absorbed attention, forward and backward: Triton and Hopper."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from absorbed_mla.core_attention.backends import hopper, triton
from absorbed_mla.core_attention.invariant_hopper import InvariantHopper
from absorbed_mla.core_attention.latent_kernels import LatentKernelBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.max_logits import MaxLogits
from absorbed_mla.core_attention.types import AttentionInputs, OutputGradient
from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.families.paged import STEP, draw_heads, perhaps_enough_tiles
from checks.fuzz.family import Config, family
from checks.fuzz.references import Attended, attention, attention_gradients
from checks.fuzz.spans import draw_long_spans, draw_spans, hide_unseen, visible

# Pairs of a query and a key, times heads: what the reference computes.
_PAIRS = 2**22
# Keys of a long sequence, on a GPU and emulated.
LONG = (5000, 2200)


class Case(NamedTuple):
    """One call: operands as kernels get them, without NaN in ``values``."""

    spans: Spans
    values: tuple[Tensor, ...]
    operands: AttentionInputs
    grad: OutputGradient
    grad_values: tuple[Tensor, Tensor | None]
    scale: float


def _configure_triton(config: Config) -> None:
    gpu = config.device.type == "cuda"
    content = config.choice(16, 32, 64, 128, 256, 512, 512) if gpu else 16
    config.rope = config.choice(0, 16, 32, 64, 64, 128) if gpu else 16
    config.dtype, config.heads = config.choice(BF16, BF16, FP16, FP32), draw_heads(config)
    config.content = min(content, 128) if config.dtype == FP32 else content
    config.last = config.choice(1, 1, 1, 2)  # stride of the operands' last axis
    config.record = config.flag(0.3)  # whether the largest scores are recorded


def _configure_hopper(config: Config) -> None:
    config.content, config.rope = config.choice(128, 256, 512, 512), config.choice(32, 64, 64)
    config.dtype, config.heads = config.choice(BF16, BF16, FP16), draw_heads(config)
    config.last, config.record = 1, config.flag(0.3)


def _draw_case(config: Config, draw: Draw, most: int, *, long: bool = False) -> Case:
    """Spans of up to ``most`` tokens, operands, and a gradient of the output.

    ``long``: few queries see many keys, causally.
    """
    content, width = config.content, config.content + config.rope
    batch = draw.choice(1, 1, 2, 3)
    pairs = _PAIRS // (config.heads * batch)
    if long:
        queries, keys, spans = draw_long_spans(draw, max(pairs // most, 1), most)
    else:
        queries, keys, spans = draw_spans(draw, max(1, min(most, math.isqrt(pairs))), 16, 64)
    normal = partial(draw.normal, dtype=config.dtype)
    magnitude = draw.often(1.0, 2.0, 4.0)
    q = normal(queries, batch, config.heads, width, magnitude=magnitude)
    kv = normal(keys, batch, width)
    grad = normal(queries, batch, config.heads, content)
    grad_lse = draw.normal(queries, batch, config.heads) if draw.flag() else None
    hidden = hide_unseen(q, spans, of_keys=False), hide_unseen(kv, spans, of_keys=True)
    q_parts, kv_parts = (
        [draw.amid_nan(x, last=config.last) for x in each.split((content, config.rope), -1)]
        for each in hidden
    )
    operands = AttentionInputs(*q_parts, kv_parts[0].unsqueeze(2), kv_parts[1], None)
    hidden_lse = grad_lse
    if grad_lse is not None:
        hidden_lse = hide_unseen(grad_lse, spans, of_keys=False)
    hidden_grad = OutputGradient(hide_unseen(grad, spans, of_keys=False), hidden_lse)
    scale = draw.choice(width**-0.5, width**-0.5, 0.3 * width**-0.5)
    return Case(spans, (q, kv), operands, hidden_grad, (grad, grad_lse), scale)


def _exact(config: Config, case: Case) -> tuple[Attended, tuple[Tensor, ...]]:
    """Attention in fp64, and its operands: queries, keys and values."""
    q, kv = (x.double() for x in case.values)
    k = kv.unsqueeze(2)
    seen = visible(case.spans, len(q), len(kv), q.device)
    operands = q, k, k[..., : config.content]
    return attention(*operands, case.scale, seen, config.dtype), operands


def _check_backward(
    config: Config,
    case: Case,
    found: AttentionInputs,
    attended: Attended,
    operands: tuple[Tensor, ...],
    compare: Comparison,
) -> None:
    """Gradients of the queries, and of the latent as key and as value.

    Keys that nothing sees may hold NaN: their gradient is 0 all the same.
    """
    grads = attention_gradients(*operands, attended, case.grad_values, case.scale, config.dtype)
    content, latent = config.content, grads.latent()
    wanted = {
        "dq_content": [x[..., :content] for x in grads.q],
        "dq_rope": [x[..., content:] for x in grads.q],
        "dlatent": [x[..., :content] for x in latent],
        "dk_rope": [x[..., 0, content:] for x in latent],
    }
    for (name, each), result in zip(wanted.items(), found):
        compare.rows(name, result, *each, config.dtype)


def _run(
    backend: LatentKernelBackend,
    config: Config,
    draw: Draw,
    compare: Comparison,
    *,
    long: bool = False,
    backward: bool = True,
) -> None:
    """Forward, the largest scores if recorded, and backward."""
    most = draw.limit(*LONG) if long else draw.limit(700, 40)
    case = _draw_case(config, draw, most, long=long)
    max_logits = None
    if config.record:
        max_logits = MaxLogits(torch.full((config.heads,), -torch.inf, device=draw.device))
    rules = ScoreRules(case.scale, case.spans, max_logits=max_logits)
    found = backend.forward(case.operands, rules)
    attended, operands = _exact(config, case)
    compare.rows("out", found.out, *attended.out, config.dtype)
    compare.lse(found.lse, attended.lse, config.dtype)
    if max_logits is not None and attended.largest.numel():
        size = attended.largest.abs().nan_to_num(0.0, 0.0, 0.0).amax((0, 1))
        largest = attended.largest.amax((0, 1))
        compare.near("largest", max_logits.heads(0, config.heads), largest, 1e-4 + 1e-5 * size)
    if backward:
        gradients = backend.backward(case.grad, found, case.operands, rules)
        _check_backward(config, case, gradients, attended, operands, compare)


def _run_stored(config: Config, draw: Draw, compare: Comparison) -> None:
    """The backward of long sequences, of any."""
    with mock.patch.object(hopper, "LEAST_STORED_PAIRS", 0):
        _run(hopper.ENTRY, config, draw, compare)


def _run_in_pieces(config: Config, draw: Draw, compare: Comparison) -> None:
    """Causal, of long sequences too; its backward is that of ``latent-hopper``."""
    with perhaps_enough_tiles(draw):
        _run(InvariantHopper(), config, draw, compare, long=True, backward=False)


def _on_hopper(name: str, *kernels: str, run: Callable, share: float = 1.0) -> None:
    """A family with the widths that the kernels for Hopper have."""
    own = (one if one.startswith("kernels.") else f"kernels.hopper.{one}" for one in kernels)

    @family(name, *own, hopper=True, share=share)
    def declared(config: Config, draw: Draw, compare: Comparison) -> None:
        _configure_hopper(config)
        run(config, draw, compare)


@family(
    "latent-triton",
    "kernels.triton.forward._forward_kernel",
    *(f"kernels.triton.backward_kernels.{one}_kernel" for one in ("delta", "query", "key")),
    share=1.5,
)
def by_triton(config: Config, draw: Draw, compare: Comparison) -> None:
    """All widths."""
    _configure_triton(config)
    _run(triton.ENTRY, config, draw, compare)


_FORWARD = "forward_kernel.attend_forward"
_DELTA = "kernels.triton.backward_kernels.delta_kernel"
_BACKWARD = "backward_kernel.attend_backward"
_STORED = "stored_backward_kernel.attend_backward_stored"
_DECODE = ("decode_kernel.attend_decode", "decode_pieces_kernel.attend_decode_pieces")
_on_hopper("latent-hopper", _FORWARD, _BACKWARD, _DELTA, run=partial(_run, hopper.ENTRY), share=1.5)
_on_hopper("latent-hopper-stored", _FORWARD, _STORED, _DELTA, run=_run_stored)
_on_hopper("latent-hopper-pieces", _FORWARD, *_DECODE, *STEP, run=_run_in_pieces)
