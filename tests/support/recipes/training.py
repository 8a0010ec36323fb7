"""What recipes run: five steps of Megatron's schedule and optimizer on the same tokens."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch import Tensor, nn

from absorbed_mla.serving.export import hf_weights
from tests.support import world
from tests.support.recipes import wrappers
from tests.support.recipes.model import VOCAB, dtype_of, tokens_of_a_sequence
from tests.support.recipes.recipe import Outcome, Recipe

STEPS, MICROBATCHES = 5, 4


class Microbatch(NamedTuple):
    """One sequence: its number in the run, and tokens [1, S]."""

    number: int
    tokens: Tensor


def train(recipe: Recipe) -> Outcome:
    """Train in the recipe's layout; its groups are made once."""
    with world.parallel(**recipe.layout.sizes):
        # It has the layers of the model before.
        destroy_moe_metrics_tracker()
        chunks = recipe.build(recipe)
        if chunks[0].config.fine_grained_activation_offloading:
            # It remembers the groups of the model before.
            PipelineOffloadManager.reset_instance()
        wrapped = [recipe.wrap(recipe, chunk) for chunk in chunks]
        config = chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        if recipe.ddp.get("overlap_grad_reduce"):
            contexts = [chunk.no_sync for chunk in wrapped]
            config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
        optimizer = get_megatron_optimizer(_optimizer_config(recipe), wrapped)
        losses: dict[int, float] = {}
        for step in range(STEPS):
            losses |= _step(recipe, wrapped, optimizer, step)
        recipe.check(chunks)
        tensors = wrappers.weights(wrapped, dtype_of(recipe))
        whole = dict(hf_weights(chunks)) if recipe.is_whole else {}
        return Outcome([losses[n] for n in sorted(losses)], tensors, whole)


def _optimizer_config(recipe: Recipe) -> OptimizerConfig:
    fields = {
        "optimizer": "adam",
        "lr": 1e-3,
        # The norm of shards is summed in another order.
        "clip_grad": 0.0,
        "bf16": dtype_of(recipe) == torch.bfloat16,
        "params_dtype": dtype_of(recipe),
    }
    return OptimizerConfig(**{**fields, **recipe.optimizer})


def _step(recipe: Recipe, wrapped: Sequence[nn.Module], optimizer, step: int) -> dict[int, float]:
    """Losses of all microbatches by their numbers, on every rank."""
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    batches = _own_microbatches(recipe, step)
    data: list[Iterator[Microbatch]] = [iter(batches) for _ in wrapped]
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=data if len(wrapped) > 1 else data[0],
        model=list(wrapped) if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(batches),
        seq_length=tokens_of_a_sequence(),
        micro_batch_size=1,
        forward_only=False,
    )
    updated, *_ = optimizer.step()
    if not updated:
        raise RuntimeError(f"the optimizer has skipped step {step}")
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {one["number"]: float(one["loss"]) for one in losses})
    return {number: loss for part in parts for number, loss in part.items()}


def _own_microbatches(recipe: Recipe, step: int) -> list[Microbatch]:
    """Those of this data-parallel rank."""
    first, count = 0, 1
    if not recipe.layout.replicated:
        first = parallel_state.get_data_parallel_rank()
        count = parallel_state.get_data_parallel_world_size()
    numbers = range(step * MICROBATCHES, (step + 1) * MICROBATCHES)[first::count]
    return [_microbatch(number) for number in numbers]


def _microbatch(number: int) -> Microbatch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (1, tokens_of_a_sequence()), generator=generator)
    return Microbatch(number, tokens.to(world.device()))


def _forward_step(
    data: Iterator[Microbatch], model: nn.Module, return_schedule_plan: bool = False
) -> tuple[object, Callable]:
    """The schedule that overlaps the exchange of experts' tokens asks for a plan of the layers."""
    batch = next(data)
    function = model.build_schedule_plan if return_schedule_plan else model
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
    labels = batch.tokens.roll(-1, 1)
    return function(batch.tokens, positions, None, labels=labels), partial(_loss, batch.number)


def _loss(number: int, output: Tensor) -> tuple[Tensor, dict[str, object]]:
    loss = output.float().mean()
    # A copy: the schedule divides the loss by the number of microbatches in place.
    return loss, {"loss": loss.detach().clone(), "number": number}


# Whether a recipe has done what its name says.


def offloaded(chunks: Sequence[nn.Module]) -> None:
    """Every module that was asked for has sent bytes to the host."""
    sent = PipelineOffloadManager.get_instance().offload_summary_bytes
    assert all(sent.get(name) for name in chunks[0].config.offload_modules), sent


def layers_offloaded(chunks: Sequence[nn.Module]) -> None:
    """TransformerEngine has sent something to the host."""
    context = chunks[0].decoder.offload_context
    assert context.offload_synchronizer.get_offloaded_total_size_mb()


def fused(chunks: Sequence[nn.Module]) -> None:
    """Some layers accumulate their weight gradients themselves."""
    modules = (module for chunk in chunks for module in chunk.modules())
    assert any(getattr(module, "fuse_wgrad_accumulation", False) for module in modules)
