"""A recipe's line in the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Row:
    """What a recipe came to.

    Attributes:
        recipe: Its name.
        layout: Of the ranks.
        reference: The run it is compared with, and that run's layout.
        losses: Largest relative difference of a loss.
        weights: Largest relative difference of a weight (Frobenius), over all ranks.
        weight: Name of that weight.
        equal: Whether all losses and weights are equal to the bit.
        tolerances: Of losses and of weights.
        note: What else is worth a word.
        missing: Why it cannot run here.
        error: Why it has no figures, in one line.
        traceback: The end of it.
        seconds: It took, its reference included if that had not run before.
    """

    recipe: str
    layout: str
    reference: str = ""
    losses: float = 0.0
    weights: float = 0.0
    weight: str = ""
    equal: bool = False
    tolerances: tuple[float, float] = (0.0, 0.0)
    note: str = ""
    missing: str = ""
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0

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
