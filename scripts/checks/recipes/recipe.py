"""What a recipe is: a layout of the ranks, options of Megatron, and the run it must be equal to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

# The largest relative difference of losses and of weights that rounding may make in five steps of
# Adam, in bfloat16 and in float32: it moves a weight by the sign of a gradient, however small.
ROUNDING = {"bfloat16": (2e-3, 4e-2), "float32": (1e-5, 1e-3)}
EXACT = (0.0, 0.0)


@dataclass(frozen=True)
class Layout:
    """How the ranks share a model; ranks that are left over are data-parallel."""

    name: str  # in the report
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
    """What a run ends with."""

    losses: list[float]  # of every microbatch of every step
    tensors: Mapping[str, Tensor]  # this rank's weights, by name
    # Weights by Hugging Face name, where runs of different layouts are compared; or why there are
    # none.
    whole: Mapping[str, Tensor] | str = field(default_factory=dict)
    note: str = ""  # what else is worth a word in the report


@dataclass(frozen=True)
class Recipe:
    """One way to train."""

    name: str  # in the report and of ``--only``
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
    # Called with the chunks after training; raises if the recipe has not done its work.
    note: Callable[[Sequence[nn.Module]], str] = lambda chunks: ""
    missing: Callable[[], str] = lambda: ""  # why it cannot run here, "" if it can

    def variant(self, name: str, **changes: Any) -> Recipe:
        """This recipe with something more, which must be equal to this one."""
        return replace(self, name=name, reference=self, **changes)

    @property
    def is_whole(self) -> bool:
        """Whether weights are put together, for comparison with another layout."""
        return self.reference is None or self.reference.layout != self.layout


@dataclass
class Row:
    """What a recipe came to: its line in the report."""

    recipe: str
    layout: str
    reference: str = ""  # the run it is compared with, and that run's layout
    losses: float = 0.0  # largest relative difference of a loss
    weights: float = 0.0  # of a weight (Frobenius), over all ranks
    weight: str = ""  # name of that weight
    equal: bool = False  # whether all losses and weights are equal to the bit
    tolerances: tuple[float, float] = EXACT  # of losses and of weights
    note: str = ""  # what else is worth a word
    missing: str = ""  # why it cannot run here
    error: str = ""  # why it has no figures, in one line
    traceback: str = ""  # the end of it
    seconds: float = 0.0  # it took, its reference included if that had not run before

    @property
    def failed(self) -> bool:
        """Whether it has an error, or a difference above its tolerance (NaN is one)."""
        within = self.losses <= self.tolerances[0] and self.weights <= self.tolerances[1]
        return bool(self.error) or not (within or self.missing)

    @property
    def verdict(self) -> str:
        """One word, or why there is none."""
        if self.missing:
            return f"cannot run here: {self.missing}"
        return "FAILED" if self.failed else "ok"

    def line(self) -> str:
        """In one line."""
        head = f"{self.seconds:5.1f} s  {self.recipe} ({self.layout}): {self.verdict}"
        if self.missing or self.error:
            return f"{head}{self.error and ': '}{self.error}"
        equal = "equal to the bit" if self.equal else "not equal to the bit"
        worst = f" ({self.weight})" if self.weights else ""
        figures = f"losses {self.losses:.1e}, weights {self.weights:.1e}{worst}, {equal}"
        allowed = "tolerances {:.0e}, {:.0e}".format(*self.tolerances)
        note = f"; {self.note}" if self.note else ""
        return f"{head}; beside {self.reference}: {figures}; {allowed}{note}"

    def as_json(self) -> dict:
        """With the verdict."""
        return {**asdict(self), "verdict": self.verdict}
