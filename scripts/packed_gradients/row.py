"""What was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class LayerRow:
    """One layer on one layout.

    Attributes:
        implementation: Whose layer.
        layout: Name of the layout.
        ran: Form and backend of ours.
        errors: Relative Frobenius error of the output and every gradient, by name.
        bounds: What a plain evaluation of the oracle's equations loses at this precision, three
            times over, by the same names.
        error: Empty, or why there are no figures.
    """

    implementation: str
    layout: str
    ran: str
    errors: dict[str, float]
    bounds: dict[str, float]
    error: str

    @property
    def out_of_bounds(self) -> list[str]:
        """Tensors whose error is above its bound, or not a number."""
        return [name for name, x in self.errors.items() if not x <= self.bounds[name]]


@dataclass(frozen=True)
class WidthRow:
    """TransformerEngine's fused attention alone, as our backend calls it.

    Attributes:
        key_width: Of query and key.
        value_width: Of the value.
        layout: As in TransformerEngine, ``"sbhd"`` or ``"thd"``.
        errors: Relative Frobenius error of the output and of the gradients, by name.
        error: Empty, or why there are no figures.
    """

    key_width: int
    value_width: int
    layout: str
    errors: dict[str, float]
    error: str


@dataclass(frozen=True)
class Findings:
    """One run of the script: one cuDNN.

    Attributes:
        environment: Machine, versions, dimensions.
        layers: Whole layers.
        widths: The attention alone.
    """

    environment: dict
    layers: Sequence[LayerRow]
    widths: Sequence[WidthRow]

    def as_json(self) -> dict:
        """All fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict) -> Findings:
        """The inverse of :meth:`as_json`."""
        return cls(
            content["environment"],
            [LayerRow(**row) for row in content["layers"]],
            [WidthRow(**row) for row in content["widths"]],
        )
