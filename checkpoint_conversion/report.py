"""Reports of conversions, dry runs and verifications, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from checkpoint_conversion.comparison import ManifestCheck, TensorDifference
from checkpoint_conversion.config_fields import dtype_name
from checkpoint_conversion.logit_comparison import LogitComparison
from checkpoint_conversion.manifest import TensorRecord
from checkpoint_conversion.planning import ConversionPlan
from checkpoint_conversion.progress import format_bytes

# Lines of one list that are printed; --json has all of them.
_LINES_SHOWN = 10
_KINDS = {"nan": "NaN", "infinite": "infinite"}


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Report of a conversion, or of a dry run.

    Attributes:
        plan: The plan of the conversion.
        target: Folder of the target.
        resumed_parts: Number of parts that an interrupted conversion had finished.
        fp8_errors: See :func:`worst_errors`.
        not_finite: Records of tensors that hold values that are not finite.
        seconds: Time from opening the source to the target's rename.
        bytes_written: Size of the weights that this run wrote, without resumed parts.
        peak_rss: Peak resident memory of the process in bytes.
        dry_run: Whether nothing was written.
    """

    plan: ConversionPlan
    target: Path
    resumed_parts: int = 0
    fp8_errors: dict | None = None
    not_finite: tuple[TensorRecord, ...] = ()
    seconds: float = 0.0
    bytes_written: int = 0
    peak_rss: int = 0
    dry_run: bool = False

    @property
    def bytes_per_second(self) -> float:
        """Throughput of this run."""
        return self.bytes_written / self.seconds if self.seconds else 0.0

    @property
    def tensors(self) -> int:
        """Number of tensors in the target; the blocks of a tensor count as one."""
        return len({entry.key for entry in self.plan.entries})

    def as_json(self) -> dict:
        """One JSON document; for a dry run, with the whole plan."""
        plan = self.plan
        document = {
            "command": "convert",
            "dry_run": self.dry_run,
            **self._sides(),
            "tensors": self.tensors,
            "parameters": plan.parameters,
            "bytes": plan.nbytes,
            "dtypes": plan.dtypes,
            "parts": len(plan.parts),
            "resumed_parts": self.resumed_parts,
            "bytes_written": self.bytes_written,
            "seconds": self.seconds,
            "bytes_per_second": self.bytes_per_second,
            "peak_rss": self.peak_rss,
            "left_out": plan.left_out,
            "fp8_errors": self.fp8_errors,
            "not_finite": [
                {"key": record.key, "offset": record.offset, **(record.not_finite or {})}
                for record in self.not_finite
            ],
            "notes": plan.notes,
        }
        return document | {"plan": plan_as_json(plan)} if self.dry_run else document

    def lines(self) -> Iterator[str]:
        """A table; for a dry run, with the whole plan below it."""
        yield from table(self._rows())
        if self.dry_run:
            yield ""
            yield from plan_lines(self.plan)

    def _sides(self) -> dict[str, dict]:
        source, writer = self.plan.checkpoint, self.plan.writer
        sides = (
            ("source", source.path, source.format, source.layout),
            ("target", self.target, writer.format, writer.layout()),
        )
        return {
            name: {"path": str(path), "format": form, "layout": layout}
            for name, path, form, layout in sides
        }

    def _rows(self) -> Iterator[tuple[str, str]]:
        plan = self.plan
        for name, side in self._sides().items():
            yield name, side["path"]
            yield name, f"{side['format']}; {describe_layout(side['layout'])}"
        yield "tensors", f"{self.tensors:,}"
        resumed = f", {self.resumed_parts:,} of them resumed" if self.resumed_parts else ""
        yield "parts", f"{len(plan.parts):,}{resumed}"
        yield "parameters", f"{plan.parameters:,}"
        yield "size", format_bytes(plan.nbytes)
        yield "dtypes", ", ".join(f"{k} {format_bytes(v)}" for k, v in plan.dtypes.items())
        if not self.dry_run:
            yield "time", f"{self.seconds:.1f} s, {format_bytes(self.bytes_per_second)}/s"
            yield "peak memory", format_bytes(self.peak_rss)
        for reason, number in Counter(plan.left_out.values()).items():
            yield "left out", f"{number:,} tensors: {reason}"
        if self.fp8_errors:
            errors = self.fp8_errors
            yield (
                "rounding",
                f"of quantised values, in {errors['tensors']:,} tensors, relative to each; at most",
            )
            yield "rounding", f"{errors['max']:.2e} of the largest value, in {errors['max_in']}"
            yield "rounding", f"{errors['rms']:.2e} root mean square, in {errors['rms_in']}"
        what = "tensors hold values not finite (--strict-values refuses them)"
        yield from counted_rows("WARNING", what, [not_finite_line(r) for r in self.not_finite])
        for note in plan.notes:
            yield "notes", note


def not_finite_line(record: TensorRecord) -> str:
    """A tensor's name and how many of its values are not finite."""
    counts = record.not_finite or {}
    values = " and ".join(f"{count:,} {_KINDS[kind]}" for kind, count in counts.items())
    return f"{record.place}: {values}"


def plan_lines(plan: ConversionPlan) -> Iterator[str]:
    """The plan as text: each part, and each tensor in it with the source tensors it is made of."""
    for part in plan_as_json(plan):
        yield f"{part['name']}: {len(part['tensors'])} tensors, {format_bytes(part['bytes'])}"
        for tensor in part["tensors"]:
            at = "" if tensor["offset"] is None else f" at {list(tensor['offset'])}"
            sources = " + ".join(tensor["sources"]) or "zeros"
            yield f"  {tensor['key']}{at} {list(tensor['shape'])} {tensor['dtype']} <- {sources}"
    for name, reason in plan.left_out.items():
        yield f"left out: {name} ({reason})"


def plan_as_json(plan: ConversionPlan) -> list[dict]:
    """The plan as JSON: the parts and their tensors."""
    return [
        {
            "name": part.name,
            "bytes": part.nbytes,
            "tensors": [
                {
                    "key": entry.key,
                    "offset": entry.offset,
                    "shape": entry.tensor.shape,
                    "dtype": dtype_name(entry.tensor.dtype),
                    "sources": sorted(entry.tensor.leaves),
                }
                for entry in part.entries
            ],
        }
        for part in plan.parts
    ]


def worst_errors(records: Iterable[TensorRecord]) -> dict | None:
    """The largest errors of all tensors that were quantised.

    Returns:
        ``tensors``, the number of quantised tensors; ``max`` and ``rms``, the largest maximum and
        root-mean-square error of a tensor; ``max_in`` and ``rms_in``, the names of these tensors.
        None if no tensor was quantised.
    """
    errors = {record.key: record.fp8_error for record in records if record.fp8_error is not None}
    if not errors:
        return None
    result: dict = {"tensors": len(errors)}
    for metric in ("max", "rms"):
        worst = max(errors, key=lambda key: errors[key][metric])
        result |= {metric: errors[worst][metric], f"{metric}_in": worst}
    return result


def table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines of a table of two columns; a name that repeats the one above is left blank."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    last = ""
    for name, value in rows:
        yield f"{'' if name == last else name:<{width}}  {value}"
        last = name


def counted_rows(name: str, what: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Rows of a table: how many lines there are, and the first of them; none without lines."""
    if not lines:
        return
    yield name, f"{len(lines):,} {what}"
    yield from ((name, f"  {line}") for line in lines[:_LINES_SHOWN])
    if len(lines) > _LINES_SHOWN:
        yield name, f"  ... and {len(lines) - _LINES_SHOWN:,} more (--json)"


def describe_layout(layout: Mapping[str, object]) -> str:
    """A layout as one line of text."""
    return ", ".join(f"{name} {value}" for name, value in layout.items()) or "one layout"


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
        found = {"equal": self.equal, "accepted": self.accepted}
        return {"command": "verify", **found, **asdict(self)}

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
