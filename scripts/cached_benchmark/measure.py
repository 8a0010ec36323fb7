"""Steps over a cache, and their measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.core_attention.backend import AttentionRequest, examine
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.dims import MLADims
from absorbed_mla.inference.attention import CachedAttention
from attention_benchmark.row import Times
from attention_benchmark.timing import Repeated
from cached_benchmark.cases import Case

SCALE = 0.1


@dataclass(frozen=True)
class Found:
    """What was measured of one case.

    Attributes:
        case: What.
        ours: Time of a step.
        beside: Time of the bare attention (prefill), or of the step with everything on the device
            (offload); None if that cannot run.
        peak_bytes: The most allocated on the device during a step; None without a GPU.
        error: Why figures are missing.
    """

    case: Case
    ours: Times | None = None
    beside: Times | None = None
    peak_bytes: int | None = None
    error: str = ""

    def as_json(self) -> dict:
        """All fields."""
        fields = {"case": vars(self.case), "peak_bytes": self.peak_bytes, "error": self.error}
        for name in ("ours", "beside"):
            times = getattr(self, name)
            fields[name] = None if times is None else vars(times)
        return fields

    @classmethod
    def from_json(cls, content: dict) -> Found:
        """The inverse of :meth:`as_json`."""
        times = {
            name: None if content[name] is None else Times(**content[name])
            for name in ("ours", "beside")
        }
        return cls(
            Case(**content["case"]), **times, **{k: content[k] for k in ("peak_bytes", "error")}
        )


class Measurement:
    """Measures cases on one device.

    Args:
        dims: DeepSeek-V3's, or as the command line says.
        device: A GPU computes in bfloat16, a CPU in float32.
        seconds: For the repetitions of a case.
        options: Of the attention.
    """

    def __init__(
        self,
        dims: dict[str, int],
        device: torch.device,
        seconds: float,
        options: AbsorbedMLAOptions,
    ) -> None:
        self.dims, self.device, self.seconds, self.options = dims, device, seconds, options
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    @torch.no_grad()
    def __call__(self, case: Case) -> Found:
        """Measure one case; what it raises is in its row."""
        try:
            ours, peak = self._times(self._step(case))
            bare = self._step(replace(case, resident=None))
            if case.suite == "prefill":
                bare = self._bare(case)
            return Found(case, ours, self._times(bare)[0], peak)
        except (RuntimeError, ValueError) as error:
            # As text: a traceback would keep tensors alive that memory is short of.
            return Found(case, error=f"{type(error).__name__}: {error}"[:1000])
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def link_bytes_per_second(self, size: int = 2**28) -> float:
        """From pinned host memory to the device."""
        on_gpu = self.device.type == "cuda"
        size = size if on_gpu else 2**20
        source = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        times, _ = self._times(lambda: target.copy_(source, non_blocking=True))
        return size / times.median

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _step(self, case: Case):
        """A forward of the attention over a cache that is filled."""
        dims = MLADims(
            hidden_size=self.dims["hidden-size"],
            num_heads=case.heads,
            num_heads_per_rank=case.heads,
            q_lora_rank=None,
            kv_lora_rank=self.dims["kv-lora-rank"],
            qk_nope_head_dim=self.dims["qk-head-dim"],
            qk_rope_head_dim=self.dims["qk-pos-emb-head-dim"],
            v_head_dim=self.dims["v-head-dim"],
        )
        options = self.options.replace(latent_cache_tokens=case.resident)
        attention = CachedAttention(dims, SCALE, options)
        context = StaticInferenceContext(case.batch, case.keys)
        for first in range(0, case.context, 8192):
            count = min(8192, case.context - first)
            filled = self._random(count, case.batch, dims.kv_down_dim)
            context.sequence_len_offset = first
            step = attention.open_step(context, 1, lambda: 0, filled)
            step.write(step.pack(filled))
        context.sequence_len_offset = case.context
        kv = self._random(case.queries, case.batch, dims.kv_down_dim)
        q = self._random(case.queries * case.batch, 1, case.heads * dims.qk_head_dim)
        weights = tuple(
            self._random(case.heads, width, dims.kv_lora_rank)
            for width in (dims.qk_nope_head_dim, dims.v_head_dim)
        )
        angles = torch.rand(len(q), dims.qk_rope_head_dim // 2, device=self.device)
        cos_sin = (angles.cos(), angles.sin())

        def run() -> Tensor:
            step = attention.open_step(context, 1, lambda: 0, kv)
            packed = step.pack(kv)
            step.write(packed)
            return attention(step, q, packed, weights, cos_sin)

        return run

    def _bare(self, case: Case):
        """Attention alone, over keys and values that are there."""
        key, value = (
            self.dims["qk-head-dim"] + self.dims["qk-pos-emb-head-dim"],
            self.dims["v-head-dim"],
        )
        request = AttentionRequest(self.device, self.dtype, key, value, False, False, False)
        backend = examine(self.options.core_attention_backend, request)[0][0]
        q = self._random(case.queries, 1, case.heads, key)
        k = self._random(case.keys, 1, case.heads, key)
        v = self._random(case.keys, 1, case.heads, value)
        span = Span(0, case.queries, 0, case.keys, causal_offset=case.context)
        rules = ScoreRules(scale=SCALE, spans=(span,))
        operands = AttentionInputs.multi_head(q, k, v)
        return lambda: backend.forward(operands, rules)

    def _times(self, run) -> tuple[Times, int | None]:
        on_gpu = self.device.type == "cuda"
        run()  # compiles
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        begin = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
        repeated = Repeated(run, None, lambda: None, on_gpu)
        return repeated.times(seconds, self.seconds)[0], peak
