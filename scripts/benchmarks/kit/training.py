"""A whole model with its optimizer, trained as one rank of Megatron's loop trains it."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from benchmarks.kit.chosen_backends import ChosenBackends
from benchmarks.kit.processes import Device
from benchmarks.kit.report import Refused

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


class Batch(NamedTuple):
    """One microbatch of one sequence or pack."""

    tokens: Tensor  # [1, S], as the next two
    positions: Tensor
    labels: Tensor
    packed: PackedSeqParams | None  # None for one sequence


class Sample(NamedTuple):
    """One measured step; bytes and the device's seconds are None without a GPU."""

    wall: float  # seconds until the device is idle again
    host: float  # seconds until the call returns
    device: float | None  # seconds between events
    peak: int | None  # bytes allocated beyond what was there before


class Trainer:
    """A GPTModel in Megatron's wrappers, with its distributed optimizer.

    Args:
        config: Of the model; gets Megatron's functions of a step.
        spec: Of its decoder block.
        vocab_size: Of embedding and output layer.
        device: To train on.
        weights: To begin with, by Megatron's names; None for random ones.

    Attributes:
        batch: Of the next steps.
        loss: Of the last step.
        ran: Forms and backends of our attentions.
        state_bytes: Allocated between steps for weights, gradients and optimizer; its maker knows.
        difference: Of the first loss to another trainer's of the same weights; None without one.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        spec: Any,
        vocab_size: int,
        device: Device,
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self._on_gpu = config, device.on_gpu
        self.batch: Batch | None = None
        self.loss = torch.zeros(())
        self.state_bytes: int | None = None
        self.difference: float | None = None
        longest = 2**20
        self.model = GPTModel(config, spec, vocab_size, longest, position_embedding_type="rope")
        self.model.to(device.device)
        self.ran = ChosenBackends(self.model)
        if weights is not None:
            # Absorbed MLA loads the names of standard MLA.
            own = {name: x for name, x in weights.items() if not name.endswith("_extra_state")}
            self.model.load_state_dict(own, strict=False)
        module = Float16Module(config, self.model) if config.bf16 else self.model
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        with _side_stream(device.on_gpu):
            self._wrapped = DistributedDataParallel(config, settings, module).train()
        options = OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            min_lr=1e-5,
            weight_decay=0.1,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        )
        self._optimizer = get_megatron_optimizer(options, [self._wrapped])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        self._forward_backward = get_forward_backward_func()

    def step(self) -> None:
        """What Megatron's ``train_step`` does of one microbatch."""
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        [self.loss] = self._forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=None,
            model=[self._wrapped],
            num_microbatches=1,
            seq_length=self._tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        updated, _, _ = self._optimizer.step()
        if not updated:
            raise ArithmeticError("the optimizer has skipped a step: gradients are not finite")

    def sample(self) -> Sample:
        """Measure one step; the device is idle before and after it."""
        on_gpu, begin, end, before = self._on_gpu, None, None, 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        started = time.perf_counter()
        self.step()
        host = time.perf_counter() - started
        if not on_gpu:
            return Sample(host, host, None, None)
        end.record()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() - before
        return Sample(wall, host, begin.elapsed_time(end) / 1e3, peak)

    @contextlib.contextmanager
    def graphs(self) -> Iterator[None]:
        """Steps on the batch at hand replay TransformerEngine's graphs of layers.

        Raises:
            Refused: Without a GPU or TransformerEngine.
        """
        if not (self._on_gpu and HAVE_TE):
            raise Refused("it needs a GPU and transformer-engine")
        microbatches.unset_num_microbatches_calculator()
        microbatches.init_num_microbatches_calculator(0, None, 1, 1, 1)
        self.config.cuda_graph_impl = "transformer_engine"
        try:
            helper = TECudaGraphHelper(
                [self._wrapped], self.config, self._tokens, 1, optimizers=[self._optimizer]
            )
            helper.create_cudagraphs()
            try:
                yield
            finally:
                helper.delete_cuda_graphs()
        finally:
            self.config.cuda_graph_impl = "none"

    @property
    def _tokens(self) -> int:
        assert self.batch is not None
        return self.batch.tokens.shape[1]

    def _forward_step(self, _, model: Any) -> tuple[Tensor, Any]:
        tokens, positions, labels, packed = self.batch or ()
        losses = model(tokens, positions, None, labels=labels, packed_seq_params=packed)
        return losses, _sum_losses


def _sum_losses(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = losses.float().sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, total.detach() / losses.numel()


@contextlib.contextmanager
def _side_stream(on_gpu: bool) -> Iterator[None]:
    """As Megatron's loop makes DDP, so that graphs need not wait for the default stream."""
    if not on_gpu:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def profile(trainer: Trainer) -> dict[str, Any]:
    """Kernels and launches of a step, and the waits of the host.

    Returns:
        ``kernels`` (copies included), ``launches`` by the host, ``busy_ms`` of the device,
        ``wait_ms`` of the host in calls that wait, ``waits``, their numbers by name.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.step()
        torch.cuda.synchronize()
    spans, launches, waits, wait_ns = [], 0, Counter(), 0
    for event in profiler.profiler.kineto_results.events():
        name, begin, length = event.name(), event.start_ns(), event.duration_ns()
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            spans.append((begin, begin + length))
        elif name.startswith(_LAUNCHES):
            launches += 1
        elif name in _WAITS:
            waits[name] += 1
            wait_ns += length
    found = {"kernels": len(spans), "launches": launches, "busy_ms": busy_ns(spans) / 1e6}
    return {**found, "wait_ms": wait_ns / 1e6, "waits": dict(waits)}


def busy_ns(spans: list[tuple[int, int]]) -> int:
    """Length of the union of (begin, end)."""
    total, done = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, done))
        done = max(done, end)
    return total


def waiting_lines(trainer: Trainer) -> dict[str, int]:
    """Lines of Python at which operators of a step wait for the device, and how often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = (one for one in caught if "synchronizing CUDA" in str(one.message))
    places = ("/".join(Path(one.filename).parts[-2:]) + f":{one.lineno}" for one in waits)
    return dict(Counter(places).most_common())


def idle_pool_bytes() -> int:
    """Reserved for graphs and not allocated, which no peak of allocated memory shows."""
    segments = torch.cuda.memory_snapshot()
    pools = (one for one in segments if tuple(one.get("segment_pool_id", (0, 0))) != (0, 0))
    return sum(one["total_size"] - one["allocated_size"] for one in pools)


def step_flops(config: MLATransformerConfig, vocab_size: int, lengths: list[int]) -> float:
    """Of a step of causal documents: three times forward, of the experts that are routed to.

    Args:
        config: Of the model.
        vocab_size: Of the output layer.
        lengths: Of the documents.
    """
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    key, value = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    query = config.q_lora_rank
    weights = heads * key * (query or hidden) + (query or 0) * hidden
    weights += (latent + config.qk_pos_emb_head_dim) * hidden + heads * value * hidden
    weights += latent * heads * (config.qk_head_dim + value)
    weights *= config.num_layers
    moe = sum(config.moe_layer_freq)
    routed = config.moe_router_topk * config.moe_ffn_hidden_size
    shared = config.moe_shared_expert_intermediate_size or 0
    weights += 3 * hidden * (config.num_layers - moe) * config.ffn_hidden_size
    weights += moe * hidden * (3 * (routed + shared) + config.num_moe_experts)
    weights += hidden * vocab_size
    pairs = sum(length**2 / 2 for length in lengths)
    attention = pairs * 2 * heads * (key + value) * config.num_layers
    return 3 * (2 * weights * sum(lengths) + attention)
