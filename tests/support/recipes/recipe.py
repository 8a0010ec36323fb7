"""What a recipe is: a layout of the ranks, options of Megatron, and the run it must be equal to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

# The largest relative difference of losses and of weights that rounding may make in five steps of
# Adam, in bfloat16 and in float32: it moves a weight by the sign of a gradient, however small.
ROUNDING = {torch.bfloat16: (2e-3, 4e-2), torch.float32: (1e-5, 1e-3)}


@dataclass(frozen=True)
class Layout:
    """How the ranks share a model; ranks that are left over are data-parallel."""

    name: str
    # As ``tests.support.world.parallel`` takes them.
    sizes: Mapping[str, int] = field(default_factory=dict)
    # Whether every data-parallel rank computes all microbatches, as one process does.
    replicated: bool = False

    @property
    def least(self) -> int:
        """Processes that it takes."""
        pipeline = self.sizes.get("pipeline_model_parallel_size", 1)
        experts = self.sizes.get("expert_model_parallel_size", 1)
        return max(self.sizes.get("tp", 1) * pipeline, experts)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]  # of every microbatch of every step
    tensors: Mapping[str, Tensor]  # this rank's weights, by name
    # Weights by Hugging Face name, where runs of different layouts are compared.
    whole: Mapping[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    name: str  # of the test
    layout: Layout
    run: Callable[[Recipe], Outcome]
    # Makes this rank's chunks of the model, with the weights that all recipes begin with.
    build: Callable[[Recipe], list[nn.Module]]
    # Makes of a chunk what computes and reduces its gradients.
    wrap: Callable[[Recipe, nn.Module], nn.Module]
    reference: Recipe | None = None  # what it must be equal to; None: it is only compared with
    exact: bool = True  # whether to the bit; else within ``ROUNDING``
    experts: bool = False  # whether the layers but the first are mixtures of experts
    bf16: bool = False  # whether it needs bfloat16 on a CPU, too
    config: Mapping[str, Any] = field(default_factory=dict)  # fields of Megatron's config,
    ddp: Mapping[str, Any] = field(default_factory=dict)  # of its DDP's,
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # and of its optimizer's
    # Called with the chunks after training; fails if the recipe has not done its work.
    check: Callable[[Sequence[nn.Module]], None] = lambda chunks: None
    missing: Callable[[], str] = lambda: ""  # why it cannot run here, "" if it can

    def variant(self, name: str, **changes: Any) -> Recipe:
        """This recipe with something more, which must be equal to this one."""
        return replace(self, name=name, reference=self, **changes)

    @property
    def is_whole(self) -> bool:
        """Whether weights are put together, for comparison with another layout."""
        return self.reference is None or self.reference.layout != self.layout
