"""Suite "clip" of qk_clip.py: ``clip_qk`` on several layers, after the step of an optimizer."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import kit

if TYPE_CHECKING:
    from torch import nn

    from benchmarks.kit.processes import Processes

torch: Any = kit.lazy("torch")
MASTERS = ("none", "distributed")
CLIPPED = ("no head", "half")
THRESHOLD = 100.0
_REPETITIONS = 10


@dataclass(frozen=True)
class ClipCase(kit.Case):
    """One call of ``clip_qk``."""

    text = "clip n={heads} layers={layers} masters={masters} {clipped}"
    heads: int  # of every layer
    layers: int  # of the model
    # "none": bf16 weights alone; "distributed": Megatron's distributed optimizer has shards of
    # fp32 copies, on all ranks.
    masters: str
    clipped: str  # one of CLIPPED, of the heads of each layer
    suite: str = "clip"


@dataclass(frozen=True, kw_only=True)
class ClipRow(kit.Row):
    """What was measured."""

    case: ClipCase
    first: float | None = None  # seconds of the first call, which asks the ranks for their shards
    again: kit.Times | None = None  # seconds of the calls after it
    # Times that such a call makes the host wait for the GPU; None without one.
    syncs: int | None = None
    # Largest relative deviation of fp32 copies from their part of the weights after the first call,
    # which is that of rounding to bf16; None without copies.
    copies_off: float | None = None

    def figures(self) -> dict[str, float]:
        """Milliseconds, and how often the host waits."""
        assert self.first is not None and self.again is not None
        found = {"first_ms": 1e3 * self.first, "ms": 1e3 * self.again.median}
        more = {"syncs": self.syncs, "copies_off": self.copies_off}
        return found | {name: value for name, value in more.items() if value is not None}


def measure_clip(case: ClipCase, args: argparse.Namespace, processes: Processes) -> ClipRow:
    """The row of a case."""
    from absorbed_mla.qk_clip import clip_qk

    model, attentions = _model(case, args, processes)

    def call() -> float:
        _pretend(attentions, case)
        processes.meet()
        begin = time.perf_counter()
        clip_qk(model)
        processes.synchronize()
        return time.perf_counter() - begin

    first, off = call(), _copies_off(attentions)
    again = kit.Times.of([call() for _ in range(_REPETITIONS)])
    _pretend(attentions, case)
    processes.meet()
    syncs = _waits(lambda: clip_qk(model), processes)
    return ClipRow(case=case, first=first, again=again, syncs=syncs, copies_off=off)


def _model(
    case: ClipCase, args: argparse.Namespace, processes: Processes
) -> tuple[nn.Module, list[nn.Module]]:
    """The wrapped model and its attentions; optimizers stay alive with their parameters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.spec_utils import build_module
    from torch import nn

    from absorbed_mla import AbsorbedMLAOptions
    from benchmarks.kit.layers import attention_spec, layer_config

    config = layer_config(args, processes, heads=case.heads, recompute=None)
    config.qk_clip, config.qk_clip_threshold = True, THRESHOLD
    spec = attention_spec(config, AbsorbedMLAOptions())
    attentions = [
        build_module(spec, config=config, layer_number=index + 1).to(processes.device)
        for index in range(case.layers)
    ]
    model = MegatronModule(config)
    model.layers = nn.ModuleList(attentions)
    whole: nn.Module = Float16Module(config, model) if config.bf16 else model
    if case.masters == "distributed":
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        whole = DistributedDataParallel(config, ddp, whole)
        settings = OptimizerConfig(
            lr=1e-4, bf16=config.bf16, use_distributed_optimizer=True, params_dtype=processes.dtype
        )
        whole.optimizer_of_benchmark = get_megatron_optimizer(settings, [whole])
    return whole, attentions


def _pretend(attentions: list[nn.Module], case: ClipCase) -> None:
    """Largest scores, as training forwards record them."""
    for attention in attentions:
        found = torch.full((case.heads,), THRESHOLD / 2, device=attention.linear_proj.weight.device)
        if case.clipped == "half":
            found[::2] = 1.01 * THRESHOLD
        attention.core_attention.current_max_attn_logits = found


def _copies_off(attentions: list[nn.Module]) -> float | None:
    """See :class:`ClipRow`; of weights whose shards were asked for."""
    from absorbed_mla.qk_clip import SHARDS

    found = []
    for weight in (w for attention in attentions for w in attention.qk_clip_weights()):
        shard = getattr(weight, "main_param", None)
        if shard is not None and SHARDS.know([weight]):
            first = SHARDS.first(weight)
            part = weight.detach().flatten()[first : first + shard.numel()].float()
            found.append(float(((shard - part).abs() / part.abs().clamp(min=1e-6)).max()))
    return max(found, default=None)


def _waits(function: Callable[[], object], processes: Processes) -> int | None:
    """How often the host waits for the GPU."""
    if not processes.on_gpu:
        function()
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in found)
