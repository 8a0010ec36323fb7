"""Report of a verification, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from checkpoint_conversion.comparison import ManifestCheck, TensorDifference
from checkpoint_conversion.logit_comparison import LogitComparison
from checkpoint_conversion.progress import format_bytes
from checkpoint_conversion.report import counted_rows, table


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the compared checkpoints.

    Attributes:
        path: As the user gave it.
        format: Name of the format.
        checksum: Checksum of the model's tensors under their Hugging Face names, which does not
            depend on the format. None if not all tensors were compared.
        manifest: Result of the comparison with its manifest; None if it has none.
    """

    path: str
    format: str
    checksum: str | None = None
    manifest: ManifestCheck | None = None


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """Result of comparing two checkpoints with each other, and each with its manifest.

    Attributes:
        sides: The checkpoints, A and B, or A alone.
        tensors: Number of tensors that both have in the same shape.
        nbytes: Bytes that were read.
        only_in_a: Names of tensors that B does not have.
        only_in_b: Names of tensors that A does not have.
        configs: Fields of the model's config that differ: name -> values in A and B.
        shapes: Tensors whose shapes differ: name -> shapes in A and B.
        differences: Tensors whose dtypes or bits differ, the worst first.
        left_out: Tensors that were not compared: name -> reason.
        logits: Comparison of the predictions; None if they were not compared.
        notes: What a user should know, one line each.
        tolerance: Largest relative error of a tensor that is accepted.
        logits_tolerance: Largest relative error of the logits that is accepted.
        seconds: Time of the verification.
    """

    sides: tuple[Side, ...]
    tensors: int = 0
    nbytes: int = 0
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    configs: dict[str, tuple[object, object]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    differences: tuple[TensorDifference, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    logits: LogitComparison | None = None
    notes: tuple[str, ...] = ()
    tolerance: float = 0.0
    logits_tolerance: float = 0.0
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether all tensors are equal bit for bit, and match the manifests."""
        return self._same_structure and not self.differences and self._manifests_match

    @property
    def accepted(self) -> bool:
        """Whether all differences are within the tolerances.

        Tensors of different dtypes are accepted only with a tolerance above zero.
        """
        close = all(
            self.tolerance > 0 and not d.not_finite and d.max_rel <= self.tolerance
            for d in self.differences
        )
        predicted = self.logits is None or self.logits.max_rel <= self.logits_tolerance
        return self._same_structure and close and self._manifests_match and predicted

    @property
    def _same_structure(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.shapes or self.configs)

    @property
    def _manifests_match(self) -> bool:
        return all(side.manifest is None or side.manifest.matches for side in self.sides)

    def as_json(self) -> dict:
        """One JSON document."""
        return {
            "command": "verify",
            "equal": self.equal,
            "accepted": self.accepted,
            **asdict(self),
        }

    def lines(self) -> Iterator[str]:
        """A table."""
        yield from table(self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        for name, side in zip(("A", "B"), self.sides):
            yield name, f"{side.path} ({side.format})"
            if side.checksum is not None:
                yield name, f"checksum of the model {side.checksum}"
            if side.manifest is not None:
                yield from self._manifest_rows(name, side.manifest)
        if len(self.sides) > 1:
            yield from self._tensor_rows()
        if self.logits is not None:
            yield from self._logit_rows(self.logits)
        for note in self.notes:
            yield "notes", note
        yield "time", f"{self.seconds:.1f} s, {format_bytes(self.nbytes)} read"
        yield "result", self._result()

    @staticmethod
    def _manifest_rows(name: str, manifest: ManifestCheck) -> Iterator[tuple[str, str]]:
        if manifest.matches:
            yield name, f"as its manifest says: {manifest.records:,} checksums"
        yield from counted_rows(name, "not as its manifest says", manifest.problems)

    def _tensor_rows(self) -> Iterator[tuple[str, str]]:
        yield "compared", f"{self.tensors:,} tensors"
        equal = self.tensors - len(self.differences)
        yield "compared", f"{equal:,} are equal bit for bit, {len(self.differences):,} are not"
        if self.left_out:
            reasons = ", ".join(sorted(set(self.left_out.values())))
            yield "left out", f"{len(self.left_out):,} tensors: {reasons}"
        configs = [f"{name}: {a!r} in A, {b!r} in B" for name, (a, b) in self.configs.items()]
        yield from counted_rows("configs differ", "fields", configs)
        yield from counted_rows("only in A", "tensors", self.only_in_a)
        yield from counted_rows("only in B", "tensors", self.only_in_b)
        shapes = [f"{name}: {a} in A, {b} in B" for name, (a, b) in self.shapes.items()]
        yield from counted_rows("shapes differ", "tensors", shapes)
        yield from counted_rows("differ", "tensors", [_described(d) for d in self.differences])
        rounded = [d.rounded for d in self.differences if d.rounded is not None]
        if rounded:
            count = f"{sum(rounded):,} of {len(rounded):,} tensors of another dtype"
            yield "rounding", f"{count} are equal after rounding to the narrower dtype"

    @staticmethod
    def _logit_rows(logits: LogitComparison) -> Iterator[tuple[str, str]]:
        yield "logits", f"{logits.origin}; A by {logits.evaluated_by[0]}"
        yield "logits", f"B by {logits.evaluated_by[1]}"
        errors = f"relative {logits.max_rel:.1e}, absolute {logits.max_abs:.1e}"
        yield "logits", f"largest error {errors}"
        divergence = f"mean {logits.kl_mean:.1e}, largest {logits.kl_max:.1e} nats"
        yield "logits", f"KL divergence {divergence}; same choice {logits.same_choice:.1%}"

    def _result(self) -> str:
        if self.equal and self.accepted:
            one = len(self.sides) == 1
            return "as its manifest says" if one else "the same model, bit for bit"
        if self.accepted:
            return f"different, but within the tolerance of {self.tolerance:g}"
        if self.equal:
            return f"same tensors, but logits differ by more than {self.logits_tolerance:g}"
        return "DIFFERENT"


def _described(difference: TensorDifference) -> str:
    d = difference
    text = f"{d.name}: relative {d.max_rel:.1e}, absolute {d.max_abs:.1e}"
    if d.not_finite:
        text += f", {d.not_finite:,} elements not finite"
    if d.dtypes[0] != d.dtypes[1]:
        text += f", {d.dtypes[0]} in A, {d.dtypes[1]} in B"
    return text
