"""A whole model with its optimizer, trained as one rank of Megatron's loop trains it."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
_ADAM = {"lr": 1e-5, "min_lr": 1e-5, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 1.0}


class Trainer:
    """A GPTModel in Megatron's wrappers, with its distributed optimizer.

    Args:
        config: Of the model; gets Megatron's functions of a step.
        spec: Of its decoder block.
        vocab_size: Of embedding and output layer.
        device: To train on.
        weights: To begin with, by Megatron's names; None for random ones.

    Attributes:
        batch: Arguments of the model's forward in the next steps, of one microbatch.
        loss: Of the last step.
        ran: Forms and backends of our attentions.
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
        self.batch: dict[str, Any] = {}
        self.loss = torch.zeros(())
        self.model = GPTModel(config, spec, vocab_size, 2**20, position_embedding_type="rope")
        self.model.to(device.device)
        if weights is not None:
            # Absorbed MLA loads the names of standard MLA.
            own = {name: x for name, x in weights.items() if not name.endswith("_extra_state")}
            self.model.load_state_dict(own, strict=False)
        self.ran = ChosenBackends(self.model)
        module = Float16Module(config, self.model) if config.bf16 else self.model
        shards = {"use_distributed_optimizer": True}
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **shards)
        with _side_stream(device.on_gpu):
            self._wrapped = DistributedDataParallel(config, ddp, module).train()
        dtypes = {"bf16": config.bf16, "params_dtype": config.params_dtype}
        options = OptimizerConfig(optimizer="adam", **_ADAM, **dtypes, **shards)
        self._optimizer = get_megatron_optimizer(options, [self._wrapped])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        self._forward_backward = get_forward_backward_func()

    def step(self) -> None:
        """What Megatron's ``train_step`` does of one microbatch."""
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        [self.loss] = self._forward_backward(
            forward_step_func=lambda _, model: (model(**self.batch), _sum_losses),
            data_iterator=None,
            model=[self._wrapped],
            num_microbatches=1,
            seq_length=self._tokens,
            micro_batch_size=1,
        )
        updated, _, _ = self._optimizer.step()
        if not updated:
            raise ArithmeticError("the optimizer has skipped a step: gradients are not finite")

    def sample(self) -> dict[str, float]:
        """One step from and to an idle device.

        Returns:
            Seconds until that, ``"wall"``, and until the call returns, ``"host"``; on a GPU those
            between events, ``"device"``, and bytes allocated beyond what was there, ``"peak"``.
        """
        if not self._on_gpu:
            begin = time.perf_counter()
            self.step()
            wall = time.perf_counter() - begin
            return {"wall": wall, "host": wall}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        first.record()
        self.step()
        last.record()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        found = {"wall": time.perf_counter() - begin, "host": host}
        peak = torch.cuda.max_memory_allocated() - before
        return {**found, "device": first.elapsed_time(last) / 1e3, "peak": peak}

    @contextlib.contextmanager
    def graphs(self) -> Iterator[None]:
        """Steps of the batch at hand replay TransformerEngine's graphs of layers.

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

    def free(self) -> None:
        """Give memory back that circles through autograd's nodes would keep; no step follows."""
        self.config.grad_scale_func = None
        for parameter in self.model.parameters():
            # Among others the optimizer's copy in fp32.
            vars(parameter).clear()
        for buffer in (*self._wrapped.buffers, *self._wrapped.expert_parallel_buffers):
            for data in (buffer.param_data, buffer.grad_data):
                data.untyped_storage().resize_(0)

    @property
    def _tokens(self) -> int:
        return self.batch["input_ids"].shape[1]


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


def profile(trainer: Trainer) -> tuple[dict[str, float], dict[str, int]]:
    """Two steps on a GPU, of which one is profiled.

    Returns:
        ``kernels`` (copies included), ``launches`` by the host, ``busy_ms`` of the device and
        ``wait_ms`` of the host in calls that wait; and how often it waits, by the call's name, and
        by the line of Python where an operator waits.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.step()
        torch.cuda.synchronize()
    spans, waits, launches, wait_ns = [], Counter(), 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif event.name() in _WAITS:
            waits[event.name()] += 1
            wait_ns += event.duration_ns()
        launches += event.name().startswith(_LAUNCHES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [one for one in caught if "synchronizing CUDA" in str(one.message)]
    waits.update("/".join([*Path(one.filename).parts[-2:], str(one.lineno)]) for one in found)
    figures = {"kernels": len(spans), "launches": launches, "busy_ms": covered(spans) / 1e6}
    return {**figures, "wait_ms": wait_ns / 1e6}, dict(waits.most_common())


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """Length of the union of (begin, end)."""
    total, done = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, done))
        done = max(done, end)
    return total


def graph_bytes() -> int:
    """Reserved by graphs, whether allocated at the moment or not."""
    pools = (
        (one.get("segment_pool_id"), one["total_size"]) for one in torch.cuda.memory_snapshot()
    )
    return sum(size for pool, size in pools if tuple(pool or (0, 0)) != (0, 0))


def step_flops(config: MLATransformerConfig, vocab_size: int, lengths: Sequence[int]) -> float:
    """Of a step of causal documents: three times forward, of the experts that are routed to."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    rope, value, query = config.qk_pos_emb_head_dim, config.v_head_dim, config.q_lora_rank
    key = config.qk_head_dim + rope
    attention = heads * key * (query or hidden) + (query or 0) * hidden + (latent + rope) * hidden
    attention += latent * heads * (config.qk_head_dim + value) + heads * value * hidden
    moe = sum(config.moe_layer_freq)
    experts = config.moe_router_topk * config.moe_ffn_hidden_size
    experts += config.moe_shared_expert_intermediate_size or 0
    dense = (config.num_layers - moe) * config.ffn_hidden_size
    weights = config.num_layers * attention + 3 * hidden * (dense + moe * experts)
    weights += hidden * (moe * config.num_moe_experts + vocab_size)
    pairs = config.num_layers * sum(length**2 / 2 for length in lengths)
    return 6 * (weights * sum(lengths) + pairs * heads * (key + value))
