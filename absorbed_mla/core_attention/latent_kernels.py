"""Base class of the backends ``hopper`` and ``triton``: attention over the latent.

Which query sees which key goes to the kernels as tile tables (``masks/tiles.py``), which are made
once for the spans of a call and kept on the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.core_attention.device_table import in_use, to_device
from absorbed_mla.core_attention.masks import tiles
from absorbed_mla.core_attention.masks.device_spans import DeviceSpans
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.kernels import operators

_OLDEST_TRITON = (3, 6)


class LatentKernelBackend:
    """Base class of backends whose kernels attend over the latent, in the absorbed form."""

    name: str
    forms = ("absorbed",)
    searches_max_logits = False
    reads_device_spans = False
    adds_query_gradients = False
    windows = False
    sinks = False

    def query_tile_size(self, inputs: AttentionInputs) -> int:
        """Query tokens in a tile of the kernels."""
        raise NotImplementedError

    def key_tiles(self, inputs: AttentionInputs, spans: Spans) -> tuple[Tensor | None, int]:
        """The tile table of keys that backward reads and its buffers; None and 1 without one."""
        return None, 1

    def backward_tables(
        self, inputs: AttentionInputs, spans: Spans
    ) -> tuple[Tensor, Tensor | None, int]:
        """The tables of queries and of keys that backward reads, and the latter's buffers."""
        return self._query_tiles(inputs, spans), *self.key_tiles(inputs, spans)

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output has the dtype of the query."""
        q_content, q_rope, k_content, k_rope, _ = inputs
        tiles = self._query_tiles(inputs, rules.spans)
        operands = q_content, q_rope, k_content.squeeze(2), k_rope, tiles
        record = rules.max_logits is not None
        out, lse, largest = self._attend(operands, rules, record)
        if record:
            rules.record(largest)
        return AttentionOutput(out, lse)

    def _attend(
        self, operands: tuple[Tensor, ...], rules: ScoreRules, record: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The operator of the forward: output, LSE and, if recorded, largest scores."""
        return operators.latent_attention_forward(*operands, rules.scale, self.name, record)

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``; the gradients of the query have its dtype."""
        q_content, q_rope, k_content, k_rope, _ = inputs
        dq_content, dq_rope, dkv = operators.latent_attention_backward(
            grad.out,
            grad.lse,
            output.out,
            output.lse,
            q_content,
            q_rope,
            k_content.squeeze(2),
            k_rope,
            *self.backward_tables(inputs, rules.spans),
            rules.scale,
            self.name,
        )
        c = k_content.shape[-1]
        return AttentionInputs(dq_content, dq_rope, dkv[..., :c].unsqueeze(2), dkv[..., c:], None)

    def _query_tiles(self, inputs: AttentionInputs, spans: Spans) -> Tensor:
        query = inputs.q_content
        return query_tile_table(spans, self.query_tile_size(inputs), len(query), query.device)


def query_tile_table(
    spans: Spans, size: int, length: int, device: torch.device, window: int | None = None
) -> Tensor:
    """The tile table of queries on the device, of the whole axis."""
    if isinstance(spans, DeviceSpans):
        assert window is None, "they are made of whole sequences"
        return spans.query_tiles(size, length)
    return in_use(
        spans.tables.get(
            ("query tiles", size, length, device, window),
            lambda: to_device(lambda: tiles.query_tiles(spans, size, length, window), device),
        )
    )


def key_tile_table(
    spans: Spans, size: int, length: int, device: torch.device, window: int | None = None
) -> tuple[Tensor, int]:
    """The tile table of keys on the device, and its number of buffers."""

    def make() -> tuple[Tensor, int]:
        table = tiles.key_tiles(spans, size, length, window)
        num_buffers = int(table[:, 5].max()) + 1 if len(table) else 1
        return to_device(table.clone, device), num_buffers

    table, num_buffers = spans.tables.get(("key tiles", size, length, device, window), make)
    return in_use(table), num_buffers


def why_not_latent_kernels(
    request: AttentionRequest, more_dtypes: tuple[torch.dtype, ...] = ()
) -> str | None:
    """Why none of the kernels can do what is requested, on any device, or None."""
    checks = {
        "it computes in fp16 and bf16": request.dtype
        not in (torch.float16, torch.bfloat16, *more_dtypes),
        "it attends over the latent (form='absorbed')": request.form != "absorbed",
        "it takes no attention_mask": request.masked,
        "it drops nothing (attention_dropout=0)": request.dropout,
    }
    return next((reason for reason, holds in checks.items() if holds), None)


def why_not_device(
    device: torch.device, suits: Callable[[tuple[int, int]], bool], needed: str
) -> str | None:
    """Why the device is none of the kernels', or None; ``suits`` sees its compute capability."""
    if device.type != "cuda":
        return "it needs a GPU"
    if torch.version.hip:  # where "9.0" is something else
        return "it needs an NVIDIA GPU"
    if not suits(torch.cuda.get_device_capability(device)):
        return f"it needs compute capability {needed}"
    return None


def why_not_triton_version(below: tuple[int, int] | None) -> str | None:
    """Why the installed Triton is not one that the kernels were run with, or None."""
    try:
        installed = importlib.import_module("triton").__version__
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    version = tuple(int(part) for part in installed.split(".")[:2])
    if version < _OLDEST_TRITON or (below is not None and version >= below):
        limit = f" and below {below[0]}.{below[1]}" if below else ""
        return f"it needs Triton 3.6 or newer{limit}; {installed} is installed"
    return None
