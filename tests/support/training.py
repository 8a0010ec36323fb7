"""A GPT model and its optimizer as ``scripts/train.py`` has them on a CPU."""

from collections.abc import Callable, Iterator

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch import Tensor

from tests.support.models import call, token_batch

OPTIONS = OptimizerConfig(
    optimizer="adam",
    lr=1e-2,
    min_lr=0.0,
    weight_decay=0.1,
    adam_beta2=0.95,
    clip_grad=1.0,
)


class Training:
    """Trains ``model`` on random tokens, a different batch in every step.

    Args:
        model: Not yet in DDP.
        options: Of the optimizer.
        labels: Of a step, by its number.
        ddp: More fields of DDP's config.

    Attributes:
        norms: Of the gradients of every step, where they are clipped.
    """

    def __init__(
        self,
        model: GPTModel,
        options: OptimizerConfig = OPTIONS,
        labels: Callable[[int], Tensor] = lambda step: token_batch(100 + step),
        **ddp: object,
    ) -> None:
        self.model = model
        # Megatron's metrics of balancing losses have the layers of the process's first model.
        destroy_moe_metrics_tracker()
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
        self.wrapped = DistributedDataParallel(model.config, config, model)
        self._optimizer = get_megatron_optimizer(options, [self.wrapped])
        self._labels = labels
        self.norms: list[float | None] = []

    def steps(self, count: int) -> list[float]:
        """Train; returns the losses."""
        return [self._step() for _ in range(count)]

    def _step(self) -> float:
        self.wrapped.train()
        self.wrapped.zero_grad_buffer()
        loss = call(self.wrapped, labels=self._labels(len(self.norms))).float().mean()
        loss.backward()
        finalize_model_grads([self.wrapped])
        updated, norm, _ = self._optimizer.step()
        assert updated
        self.norms.append(norm)
        self._optimizer.zero_grad()
        return loss.item()

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on: parameters, moments, random numbers."""
        return dict(self._named_state())

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.model.state_dict().items():
            if isinstance(value, Tensor):
                yield f"model.{name}", value.clone()
        state = self._optimizer.sharded_state_dict(self.model.sharded_state_dict(), True)
        for index, tensor in enumerate(nested_values(state)):
            if isinstance(tensor, ShardedTensor):
                yield f"optimizer.{index}.{tensor.key}", tensor.data.clone()
        yield "rng", torch.get_rng_state()
        for name, value in tensor_parallel.get_cuda_rng_tracker().get_states().items():
            yield f"rng.{name}", value.clone()


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of tensors that differ in a bit, or that one side lacks."""
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    ]
