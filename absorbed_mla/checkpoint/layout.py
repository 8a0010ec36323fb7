"""Checkpoint layouts: what distinguishes them, recognising them, and changing one for another.

Megatron writes the same weights in several layouts. One is the default layout, in which the K and V
up-projections are one weight and everything else is a weight of its own. Each file of ``layouts/``
declares one difference from it, as data; a checkpoint has any combination of these differences.
``state_dict.py`` (tensors of a rank) and ``checkpoint_conversion`` (lazy tensors of a whole model)
both work from these declarations. Nothing here imports torch or Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from absorbed_mla.registry import CHECKPOINT_LAYOUTS


class Sizes(Protocol):
    """Dimensions of an attention, of ``MLADims`` or of a converter's model."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""

    @property
    def q_lora_rank(self) -> int | None:
        """Width of the compressed query; None if the query is projected directly."""

    @property
    def kv_lora_rank(self) -> int:
        """Width of the latent."""

    @property
    def qk_nope_head_dim(self) -> int:
        """Per-head width of query and key without position."""

    @property
    def qk_rope_head_dim(self) -> int:
        """Width of the rotary part."""

    @property
    def v_head_dim(self) -> int:
        """Per-head width of the value."""


@dataclass(frozen=True)
class Rename:
    """A weight that has another name in a layout.

    Attributes:
        default: Its name in the default layout.
        name: Its name in this one.
        needs: Only layers that have a weight of this name rename it; None: all layers.
    """

    default: str
    name: str
    needs: str | None = None


@dataclass(frozen=True)
class Stack:
    """One weight [rows, columns] that holds the rows of several.

    Attributes:
        whole: Its name.
        parts: Names of the weights in it, first rows first.
        rows: Rows of each part; of one head, if ``per_head``.
        columns: Columns of all of them.
        per_head: Whether the rows of each head stay together.
    """

    whole: str
    parts: tuple[str, ...]
    rows: Callable[[Sizes], tuple[int, ...]]
    columns: Callable[[Sizes], int]
    per_head: bool = False


def _always(sizes: Sizes) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One difference from the default layout; what a file of ``layouts/`` declares.

    Attributes:
        name: Name of the file.
        summary: One line about it, for tables of what is supported.
        option: What users choose it by: an argument of ``to_standard_state_dict``, an option of
            the converter, a field of its reports.
        value: What the option calls this layout.
        default: What the option calls the default layout.
        help: What the option is about, for the converter's ``--help``.
        renames: Weights that have other names.
        joined: Stacks that are one weight here and several by default.
        split: Stacks that are several weights here and one by default.
        backend: The layers whose names these are, as ``save_model_weights(norm_names=)`` calls
            them; None if no backend implies this layout.
        in_absorbed: Whether the converter may write this package's own checkpoints in it.
        why_not: Why a model of given dimensions cannot have it; None if it can.
    """

    name: str
    summary: str
    option: str
    value: str
    default: str
    help: str
    renames: tuple[Rename, ...] = ()
    joined: tuple[Stack, ...] = ()
    split: tuple[Stack, ...] = ()
    backend: str | None = None
    in_absorbed: bool = False
    why_not: Callable[[Sizes], str | None] = _always

    @property
    def own_names(self) -> set[str]:
        """Names that only this layout has."""
        names = {rename.name for rename in self.renames}
        names.update(stack.whole for stack in self.joined)
        return names.union(*(stack.parts for stack in self.split))

    def default_name(self, name: str) -> str | None:
        """The weight of the default layout that has the rows of ``name``, or the first of them."""
        for rename in self.renames:
            if rename.name == name:
                return rename.default
        for stack in self.joined:
            if stack.whole == name:
                return stack.parts[0]
        return next((stack.whole for stack in self.split if name in stack.parts), None)


def layout_options() -> dict[str, tuple[str, ...]]:
    """The options of all layouts, each with the values it accepts, the default first."""
    options: dict[str, tuple[str, ...]] = {}
    for layout in CHECKPOINT_LAYOUTS:
        options[layout.option] = (*options.get(layout.option, (layout.default,)), layout.value)
    return options


class MegatronLayout:
    """The layout of a checkpoint: a value for each option of ``layouts/``.

    Args:
        choices: Option -> value, e.g. ``norms="fused"``; also the attributes. What is not given has
            its default.

    Raises:
        ValueError: If an option or a value is unknown.
    """

    def __init__(self, **choices: str) -> None:
        options = layout_options()
        for option, value in choices.items():
            if option not in options:
                raise ValueError(f"{option} is no option of a layout ({', '.join(options)})")
            if value not in options[option]:
                accepted = ", ".join(options[option])
                raise ValueError(f"{option} must be one of {accepted}; got {value!r}")
        self.choices = {option: values[0] for option, values in options.items()} | choices

    @classmethod
    def recognise(cls, names: Iterable[str]) -> MegatronLayout:
        """Recognise the layout from names of weights, relative to their layers or in full."""
        names = {f".{name}" for name in names}
        found: dict[str, str] = {}
        for layout in CHECKPOINT_LAYOUTS:
            own = tuple(f".{name}" for name in layout.own_names)
            if any(name.endswith(own) for name in names):
                found[layout.option] = layout.value
        return cls(**found)

    def includes(self, layout: Layout) -> bool:
        """Whether this is one of the differences that make up the layout."""
        return self.choices.get(layout.option) == layout.value

    def describe(self) -> dict[str, object]:
        """Option -> value."""
        return dict(self.choices)

    def __getattr__(self, option: str) -> str:
        if option == "choices" or option not in self.choices:
            raise AttributeError(option)
        return self.choices[option]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MegatronLayout) and self.choices == other.choices

    def __repr__(self) -> str:
        return f"MegatronLayout({self})"

    def __str__(self) -> str:
        return ", ".join(f"{option} {value}" for option, value in self.choices.items())


# A tensor, or a converter's lazy tensor.
T = TypeVar("T", bound=Any)


class LayoutChange(Generic[T]):
    """Brings the weights of one layer after another into a layout, from whatever they are in.

    Weights that no layout names stay as they are. Whatever does not fit is left alone and recorded.

    Args:
        layout: To change to.
        sizes: Dimensions of the attention.
        heads: Attention heads of the weights, those of a rank or all.
        concat: Concatenates tensors along a dim.
        reshape: Gives a tensor another shape.
        sharded: Whether weights may be a rank's equal part of the rows of each part of a stack.
        kept: Weights that keep their names of the default layout.

    Attributes:
        problems: What does not fit, one line each.
    """

    def __init__(
        self,
        layout: MegatronLayout,
        sizes: Sizes,
        heads: int,
        concat: Callable[[Sequence[T], int], T],
        reshape: Callable[[T, tuple[int, ...]], T],
        *,
        sharded: bool = False,
        kept: Collection[str] = (),
    ) -> None:
        self.problems: list[str] = []
        self._sizes, self._heads, self._sharded = sizes, heads, sharded
        self._kept = kept
        self._concat, self._reshape = concat, reshape
        self._all = list(CHECKPOINT_LAYOUTS)
        self._wanted = [one for one in self._all if layout.includes(one)]

    def apply(self, weights: Mapping[str, T], full_name: Callable[[str], str]) -> dict[str, T]:
        """Change one layer.

        Args:
            weights: By their names relative to the layer.
            full_name: Makes of such a name what the user knows the weight by.
        """
        result = dict(weights)
        for rename in (rename for one in self._all for rename in one.renames):
            if rename.name in result:
                self._refuse_twice(result, (rename.default,), rename.name, full_name)
                result = _replaced(result, [rename.name], {rename.default: result[rename.name]})
        # First back to the default layout, then to the one that is wanted.
        for one in sorted(self._all, key=self._wanted.__contains__):
            joined, split = one.joined, one.split
            if one not in self._wanted:
                joined, split = split, joined
            for stack in joined:
                result = self._join(result, stack, full_name)
            for stack in split:
                result = self._split(result, stack, full_name)
        for rename in (rename for one in self._wanted for rename in one.renames):
            if rename.default not in result or rename.default in self._kept:
                continue
            if rename.needs is None or rename.needs in result:
                result = _replaced(result, [rename.default], {rename.name: result[rename.default]})
        return result

    def _join(
        self, weights: dict[str, T], stack: Stack, full_name: Callable[[str], str]
    ) -> dict[str, T]:
        present = [part for part in stack.parts if part in weights]
        if not present:
            return weights
        if stack.whole in weights:
            self._refuse_twice(weights, present[:1], stack.whole, full_name)
            return weights
        columns, problems = stack.columns(self._sizes), []
        for part, rows in zip(stack.parts, self._rows(stack)):
            if part not in weights:
                problems.append(f"{full_name(part)} is missing, this model needs {(rows, columns)}")
            elif not self._fits(weights[part], rows, columns, stack):
                problems.append(_misshapen(full_name(part), weights[part], (rows, columns)))
        if not problems and len({weights[part].dtype for part in stack.parts}) > 1:
            problems.append(f"{' and '.join(map(full_name, stack.parts))} differ in dtype")
        self.problems += problems
        if problems:
            return weights
        parts = [weights[part] for part in stack.parts]
        if stack.per_head:
            # [heads, rows of one head, columns], so that concatenating keeps heads together.
            by_head = [
                self._reshape(part, (self._heads, part.shape[0] // self._heads, columns))
                for part in parts
            ]
            rows = sum(part.shape[0] for part in parts)
            whole = self._reshape(self._concat(by_head, 1), (rows, columns))
        else:
            whole = self._concat(parts, 0)
        return _replaced(weights, stack.parts, {stack.whole: whole})

    def _split(
        self, weights: dict[str, T], stack: Stack, full_name: Callable[[str], str]
    ) -> dict[str, T]:
        if stack.whole not in weights:
            return weights
        twice = [part for part in stack.parts if part in weights]
        whole, columns, rows = weights[stack.whole], stack.columns(self._sizes), self._rows(stack)
        if twice or not self._fits(whole, sum(rows), columns, stack):
            self._refuse_twice(weights, twice[:1], stack.whole, full_name)
            if not twice:
                self.problems.append(
                    _misshapen(full_name(stack.whole), whole, (sum(rows), columns))
                )
            return weights
        if stack.per_head:
            one_head = [count // self._heads for count in rows]
            by_head = self._reshape(whole, (self._heads, sum(one_head), columns))
            parts = [
                self._reshape(part, (count, columns))
                for part, count in zip(by_head.split(one_head, 1), rows)
            ]
        else:
            shards = sum(rows) // whole.shape[0]
            parts = whole.split([count // shards for count in rows], 0)
        return _replaced(weights, [stack.whole], dict(zip(stack.parts, parts)))

    def _rows(self, stack: Stack) -> list[int]:
        heads = self._heads if stack.per_head else 1
        return [heads * rows for rows in stack.rows(self._sizes)]

    def _fits(self, weight: T, rows: int, columns: int, stack: Stack) -> bool:
        shape = tuple(weight.shape)
        if not self._sharded or stack.per_head or not shape or not shape[0]:
            return shape == (rows, columns)
        shards, rest = divmod(rows, shape[0])
        divides = all(part % shards == 0 for part in self._rows(stack)) if shards else False
        return shape[1:] == (columns,) and not rest and divides

    def _refuse_twice(
        self,
        weights: Mapping[str, T],
        names: Sequence[str],
        other: str,
        full_name: Callable[[str], str],
    ) -> None:
        """Record weights that are there in two layouts: nothing says which is meant."""
        self.problems += [
            f"{full_name(name)} and {full_name(other)} are one weight, stored twice"
            for name in names
            if name in weights
        ]


def _misshapen(name: str, weight: Any, expected: tuple[int, ...]) -> str:
    return f"{name} has shape {tuple(weight.shape)}, this model needs {expected}"


def _replaced(weights: Mapping[str, T], old: Sequence[str], new: Mapping[str, T]) -> dict[str, T]:
    """The weights with ``new`` ones at the place of the first of the ``old`` ones."""
    result: dict[str, T] = {}
    for name, weight in weights.items():
        if name not in old:
            result[name] = weight
        elif name == next(one for one in weights if one in old):
            result.update(new)
    return result
