"""Errors of TransformerEngine's fused attention alone, by the widths of its heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from context_parallel_benchmark.row import shortened
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionBackend, ReferenceBackend
from absorbed_mla.core_attention.backends.transformer_engine import TransformerEngineAttention
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from packed_gradients.row import WidthRow
from tests.support.numerics import relative_error

# Of key and value: Megatron pads the value of packs to the key's width.
WIDTHS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 128), (256, 256))


def measure_widths(
    heads: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[WidthRow]:
    """One sequence (``sbhd``) and a pack of two (``thd``), causal, beside float64."""
    cut = tokens * 5 // 16
    spans = {
        "sbhd": (Span(0, tokens, 0, tokens, 0),),
        "thd": (Span(0, cut, 0, cut, 0), Span(cut, tokens, cut, tokens, 0)),
    }
    for key_width, value_width in WIDTHS:
        for layout, seen in spans.items():
            rules = ScoreRules(key_width**-0.5, seen)
            inputs = _inputs(tokens, heads, key_width, value_width, device, dtype)
            exact = _outcome(ReferenceBackend(), [x.double() for x in inputs], rules)
            errors, error = {}, ""
            try:
                found = _outcome(TransformerEngineAttention(), inputs, rules)
                errors = {name: relative_error(found[name], exact[name]) for name in exact}
            except Exception as problem:
                error = shortened(f"{type(problem).__name__}: {problem}", 1000)
            yield WidthRow(key_width, value_width, layout, errors, error)


def _inputs(
    tokens: int, heads: int, key: int, value: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Query, key, value and the output's gradient [S, 1, N, width], normal values."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(tokens, 1, heads, width) for width in (key, key, value, value)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _outcome(
    backend: AttentionBackend, inputs: list[Tensor], rules: ScoreRules
) -> dict[str, Tensor]:
    """Output and gradients by name."""
    q, k, v, grad_out = inputs
    operands = AttentionInputs.multi_head(q, k, v)
    attended = backend.forward(operands, rules)
    attended = AttentionOutput(attended.out.to(q.dtype), attended.lse)
    found = backend.backward(OutputGradient(grad_out, None), attended, operands, rules)
    gradients = found.as_multi_head()
    return dict(zip(("output", "dq", "dk", "dv"), (attended.out, *gradients)))
