"""What a recipe is: a layout of the ranks, options of Megatron, and the run it must be equal to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

# The largest relative difference of losses and of weights that rounding may make in five steps of
# Adam, in bfloat16 and in float32: it moves a weight by the sign of a gradient, however small.
ROUNDING = {"bfloat16": (2e-3, 4e-2), "float32": (1e-5, 1e-3)}
# Of Muon, which gives the smallest directions of a gradient the size of the largest.
MUON_ROUNDING = {"bfloat16": (2e-3, 1e-1), "float32": (1e-5, 1e-3)}
EXACT = (0.0, 0.0)


@dataclass(frozen=True)
class Layout:
    """How the ranks share a model; ranks that are left over are data-parallel.

    Attributes:
        name: In the report.
        sizes: As ``tests.support.world.parallel`` takes them.
        replicated: Whether every data-parallel rank computes all microbatches, as one process does.
    """

    name: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    replicated: bool = False

    @property
    def least(self) -> int:
        """Processes that it takes."""
        pipeline = self.sizes.get("pipeline_model_parallel_size", 1)
        experts = self.sizes.get("expert_model_parallel_size", 1)
        return max(self.sizes.get("tp", 1) * pipeline, experts)


@dataclass(frozen=True)
class Outcome:
    """What a run ends with.

    Attributes:
        losses: Of every microbatch of every step.
        tensors: This rank's weights, by name.
        whole: Weights by Hugging Face name, where runs of different layouts are compared; or why
            there are none.
        note: What else is worth a word in the report.
    """

    losses: list[float]
    tensors: Mapping[str, Tensor]
    whole: Mapping[str, Tensor] | str = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """One way to train, or to use what was trained.

    Attributes:
        name: In the report and of ``--only``.
        layout: Of the ranks.
        run: What it does.
        reference: The recipe that it must be equal to; None: it is only compared with.
        exact: Whether it must be equal to the bit; else within ``rounding``.
        rounding: Largest relative differences of losses and weights, by dtype.
        experts: Whether the layers but the first are mixtures of experts.
        bf16: Whether it needs bfloat16 on a CPU, too.
        config: Fields of Megatron's config.
        ddp: Fields of its DDP's config.
        optimizer: Fields of its optimizer's config.
        build: Makes this rank's chunks of the model, with the weights that all recipes begin with.
        wrap: Makes of a chunk what computes and reduces its gradients.
        after_step: Called with the wrapped chunks after every step of the optimizer.
        note: Called with the chunks after training; raises if the recipe has not done its work.
        missing: Why it cannot run here, "" if it can.
    """

    name: str
    layout: Layout
    run: Callable[[Recipe], Outcome]
    build: Callable[[Recipe], list[nn.Module]]
    wrap: Callable[[Recipe, nn.Module], nn.Module]
    reference: Recipe | None = None
    exact: bool = True
    rounding: Mapping[str, tuple[float, float]] = field(default_factory=ROUNDING.copy)
    experts: bool = False
    bf16: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    after_step: Callable[[Sequence[nn.Module]], None] = lambda chunks: None
    note: Callable[[Sequence[nn.Module]], str] = lambda chunks: ""
    missing: Callable[[], str] = lambda: ""

    def variant(self, name: str, **changes: Any) -> Recipe:
        """This recipe with something more, which must be equal to this one."""
        return replace(self, name=name, reference=self, **changes)

    @property
    def is_whole(self) -> bool:
        """Whether weights are put together, for comparison with another layout."""
        return self.reference is None or self.reference.layout != self.layout
