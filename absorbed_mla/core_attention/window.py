"""Sliding windows: a token sees itself and the tokens right before it, by any attention backend.

Megatron's ``window_size`` and ``window_attn_skip_freq``. Some kernels bound keys from below, too
(``AttentionBackend.windows``). Others know causal spans, which are bounded on one side only; for
them queries are cut into chunks of a window's length: a chunk sees its own keys causally, and of
the keys right before it those that are not too old, which is causal if queries and keys are counted
from their ends. The two are computed one after the other and merged by their LSE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.merge import merge_into
from absorbed_mla.core_attention.types import (
    AttentionInputs,
    AttentionOutput,
    OutputGradient,
)


def window_of(
    config: MLATransformerConfig, layer_number: int | None, *, causal: bool
) -> int | None:
    """Keys that a token of a layer sees, itself included; None for all before it.

    Args:
        config: Megatron's; its ``window_size`` counts the tokens before and behind the token.
        layer_number: Of the layer in the model, from 1; None where it has no number.
        causal: Whether a token sees only itself and earlier tokens.

    Raises:
        ValueError: If ``window_size`` is no window of earlier tokens.
    """
    size = config.window_size
    if size is None:
        return None
    before, behind = size
    if before < 0 or behind != 0 or not causal:
        raise ValueError(
            "window_size must be None, or (tokens before, 0) with at least 0 before and a causal "
            f"attn_mask_type: a token sees none behind itself; got {size!r}"
            f"{'' if causal else ' and another attn_mask_type'}"
        )
    number = 1 if layer_number is None else layer_number
    if not is_layer_window_attention(size, config.window_attn_skip_freq, number):
        return None
    return before + 1


@dataclass(frozen=True, eq=False)
class WindowedBackend:
    """An ``AttentionBackend`` whose queries see the last keys of what the spans show.

    Attributes:
        backend: Computes the window, or both parts of it.
        window: Keys that a query sees, at most.
    """

    backend: AttentionBackend
    window: int

    @property
    def name(self) -> str:
        """Of the backend."""
        return self.backend.name

    @property
    def sinks(self) -> bool:
        """Whether the backend has them, and takes all keys of a window at once."""
        return self.backend.windows and self.backend.sinks

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``AttentionBackend``; every span has a causal offset."""
        if self.backend.windows:
            return self.backend.forward(inputs, self._bounded(rules))
        near, far = self._parts(inputs, rules)
        output = AttentionOutput(*self.backend.forward(inputs, near))
        if not far.spans:
            return output
        older = AttentionOutput(*map(_turn, self.backend.forward(_turned(inputs), far)))
        out, lse = torch.empty_like(output.out), torch.empty_like(output.lse)
        merge_into(out, lse, output, older)
        return AttentionOutput(out, lse)

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``AttentionBackend``: output and LSE are those over the keys of both parts."""
        if self.backend.windows:
            return self.backend.backward(grad, output, inputs, self._bounded(rules))
        near, far = self._parts(inputs, rules)
        found = self.backend.backward(grad, output, inputs, near)
        if not far.spans:
            return found
        turned = _turned(grad), _turned(output), _turned(inputs)
        older = self.backend.backward(*turned, far)
        for total, part in zip(found, older):
            if total is not None and total.numel():
                total.add_(_turn(part))
        return found

    def _bounded(self, rules: ScoreRules) -> ScoreRules:
        """The rules with the window, unless it holds all that the spans show."""
        spans = rules.spans
        last = spans.tables.get("last position", lambda: max(map(_last_position, spans), default=0))
        return replace(rules, window=self.window) if last > self.window else rules

    def _parts(self, inputs: AttentionInputs, rules: ScoreRules) -> tuple[ScoreRules, ScoreRules]:
        """The rules of the chunks' own keys, and of those before them on axes that are turned."""
        shape = len(inputs.q_content), len(inputs.k_content)
        near, far = rules.spans.tables.get(
            ("window", self.window, shape), lambda: near_and_far(rules.spans, self.window, *shape)
        )
        mask, tokens = rules.attention_mask, (rules.query_tokens, rules.key_tokens)
        if mask is not None and far:
            mask = mask.flip((2, 3))
        if rules.dropout and far:
            tokens = tuple(_turn(x) for x in tokens)
        turned = {"attention_mask": mask, "query_tokens": tokens[0], "key_tokens": tokens[1]}
        return replace(rules, spans=near), replace(rules, spans=far, **turned)


def near_and_far(spans: Spans, window: int, num_queries: int, num_keys: int) -> tuple[Spans, Spans]:
    """Causal spans of the last ``window`` keys that the queries of causal spans see.

    Args:
        spans: Their offsets are those of positions, also where every query sees every key.
        window: Keys of a query, at most.
        num_queries: Of the axis.
        num_keys: Likewise.

    Returns:
        Spans on the axes as they are, and spans on axes that are counted from their ends.
    """
    near: list[Span] = []
    far: list[Span] = []
    for span in spans:
        offset = span.causal_offset
        assert offset is not None, "a window counts positions"
        if offset >= 0 and offset + span.num_queries <= window:
            near.append(span)
            continue
        # The queries that see a key.
        first = span.query_start + max(0, -offset)
        last = min(span.query_end, span.query_start + span.num_keys - 1 + window - offset)
        for start in range(first, last, window):
            end = min(start + window, last)
            # Where the first query's own key is, or would be.
            own = span.key_start + offset + start - span.query_start
            if own < span.key_end:
                near.append(Span(start, end, own, min(own + end - start, span.key_end), 0))
            oldest, newest = max(span.key_start, own - window + 1), min(own, span.key_end)
            # The last query that still sees the newest of them sees it alone.
            end = min(end, start + window - 1 - (own - newest))
            if oldest < newest and start < end:
                seen = window - 1 - (own - newest) - (end - start)
                far.append(Span(start, end, oldest, newest, seen))
    turned = (
        Span(
            num_queries - span.query_end,
            num_queries - span.query_start,
            num_keys - span.key_end,
            num_keys - span.key_start,
            span.causal_offset,
        )
        for span in reversed(far)
    )
    return Spans(near), Spans(turned)


def _last_position(span: Span) -> int:
    """Of the last query of a span, counted from the first key, from 1."""
    assert span.causal_offset is not None, "a window counts positions"
    return span.causal_offset + span.num_queries


def _turned(tensors):
    """A tuple of tensors [S, ...], each in the opposite order; None stays."""
    return type(tensors)(*(None if x is None else _turn(x) for x in tensors))


def _turn(x: Tensor) -> Tensor:
    return x.flip(0)
