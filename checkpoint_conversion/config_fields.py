"""Reading config.json: typed fields of an untrusted dictionary, and the rotary embedding.

Everything that is wrong is collected, so that one run finds all problems. ``rope_theta`` and
``rope_scaling`` are transformers 4's names; transformers 5 has both in ``rope_parameters``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkpoint_conversion.errors import CheckpointError

_MOST_POSITIONS = 2**31
_MOST = 1e12
MOST_EXPERTS = 2**16


class _Shown(reprlib.Repr):
    """A bounded ``repr``; Python refuses to print integers of thousands of digits."""

    def repr_int(self, x: int, level: int) -> str:
        """The integer, or its length in bits if it is large."""
        return str(x) if x.bit_length() <= 64 else f"<integer of {x.bit_length()} bits>"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """A value as error messages show it, in one short line."""
    return " ".join(_SHOWN.repr(value).split())


def dtype_name(dtype: object) -> str:
    """The name of a ``torch.dtype`` without its module, e.g. ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


class Fields:
    """Reads typed fields of a dictionary.

    A field that is null counts as missing. A wrong value is recorded as a problem and replaced by
    an acceptable one, so that one run finds all problems.

    Args:
        values: The dictionary.
        problems: Receives one line per problem.
        prefix: Precedes every field name in messages.
    """

    def __init__(self, values: Mapping[str, object], problems: list[str], prefix: str = "") -> None:
        self._values = values
        self.problems = problems
        self._prefix = prefix

    def raw(self, name: str) -> object:
        """The value as it is; None if there is none."""
        return self._values.get(name)

    def given(self, name: str) -> bool:
        """Whether there is a value that is not null."""
        return self.raw(name) is not None

    def null(self, name: str) -> bool:
        """Whether the field is there and null."""
        return name in self._values and self.raw(name) is None

    def equals(self, name: str, expected: object) -> bool:
        """Whether the value is a bool, number or string and equal to ``expected``."""
        value = self.raw(name)
        return isinstance(value, bool | int | float | str) and value == expected

    def wrong(self, name: str, accepted: str) -> None:
        """Record that a field is missing or has a value that is not accepted."""
        if self.given(name):
            got = shown(self.raw(name))
            self.problems.append(f"{self._prefix}{name} must be {accepted}, got {got}")
        else:
            self.problems.append(f"{self._prefix}{name} is missing; it must be {accepted}")

    def raise_problems(self, summary: str) -> None:
        """Raise an error if any problem was recorded."""
        if self.problems:
            raise CheckpointError(summary, self.problems)

    def integer(self, name: str, most: int, *, least: int = 1, default: int | None = None) -> int:
        """An integer from ``least`` to ``most``; without a default it must be there."""
        if not self.given(name) and default is not None:
            return default
        return self._integer(name, least, most, f"an integer from {least} to {most}")

    def integer_or_null(self, name: str, most: int, *, least: int = 1) -> int | None:
        """An integer from ``least`` to ``most`` or, if the field is there and null, None."""
        if self.null(name):
            return None
        return self._integer(name, least, most, f"null or an integer from {least} to {most}")

    def _integer(self, name: str, least: int, most: int, accepted: str) -> int:
        value = self.raw(name)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        self.wrong(name, accepted)
        return least

    def number(
        self, name: str, least: float, most: float, *, default: float | None = None
    ) -> float:
        """A number from ``least`` to ``most``; without a default it must be there."""
        if not self.given(name) and default is not None:
            return default
        value = self.raw(name)
        # Not a number compares as false.
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and least <= value <= most
        ):
            return value
        self.wrong(name, f"a number from {least:g} to {most:g}")
        return least

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(name) if self.given(name) else default
        if isinstance(value, bool):
            return value
        self.wrong(name, "true or false")
        return default

    def choice(self, name: str, accepted: Sequence[str], default: str | None = None) -> str:
        """One of some strings; without a default it must be there."""
        if not self.given(name) and default is not None:
            return default
        value = self.raw(name)
        if isinstance(value, str) and value in accepted:
            return value
        self.wrong(name, " or ".join(map(repr, accepted)))
        return accepted[0]

    def section(self, name: str) -> Fields | None:
        """The fields of a dictionary inside, or None if there is none."""
        if not self.given(name):
            return None
        value = self.raw(name)
        if not isinstance(value, dict):
            self.wrong(name, "an object")
            return None
        return Fields(value, self.problems, f"{self._prefix}{name}.")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """A rotary embedding; fields are named like Megatron's options.

    Without YaRN ``rotary_scaling_factor`` is 1 and the fields after it have no effect.

    Attributes:
        rope_type: ``"rope"`` or ``"yarn"``.
        mscale: Scales cosine and sine, together with ``mscale_all_dim``.
        mscale_all_dim: Scales the softmax.
    """

    rotary_base: float
    rope_type: str = "rope"
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def hugging_face(self) -> dict[str, object]:
        """The fields of config.json, in transformers 4's style, which all releases read."""
        scaling = None
        if self.rope_type == "yarn":
            scaling = {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": self.rotary_scaling_factor,
                "original_max_position_embeddings": self.original_max_position_embeddings,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "mscale": self.mscale,
                "mscale_all_dim": self.mscale_all_dim,
            }
        return {"rope_theta": self.rotary_base, "rope_scaling": scaling}


def read_rotary(fields: Fields, part: float = 1.0) -> Rotary:
    """Read the rotary embedding from config.json.

    Args:
        fields: Fields of the whole file.
        part: Value that ``partial_rotary_factor`` must have if it is given.
    """
    _check_part(fields, part)
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    found = [_read_scaling(fields, section, part) for section in (new, old) if section is not None]
    if len(found) == 2 and found[0] != found[1]:
        fields.problems.append(
            "rope_parameters and rope_scaling must agree, got "
            f"{shown(fields.raw('rope_parameters'))} and {shown(fields.raw('rope_scaling'))}"
        )
    return found[0] if found else Rotary(rotary_base=_base(fields))


def _check_part(fields: Fields, part: float) -> None:
    """Record a ``partial_rotary_factor`` that leaves some of the rotary channels as they are."""
    if fields.given("partial_rotary_factor") and not fields.equals("partial_rotary_factor", part):
        fields.wrong("partial_rotary_factor", f"{part:g}")


def _read_scaling(fields: Fields, section: Fields, part: float) -> Rotary:
    _check_part(section, part)
    base = _base(section if section.given("rope_theta") else fields)
    kind = "rope_type" if section.given("rope_type") else "type"
    if section.choice(kind, ("yarn", "default"), "default") == "default":
        return Rotary(rotary_base=base)
    # Transformers has these for YaRN; Megatron's MLA does not.
    for name, neutral in (("attention_factor", None), ("truncate", True)):
        if section.given(name) and section.raw(name) is not neutral:
            section.wrong(name, "left out: Megatron's MLA has no such option")
    mscale_all_dim = section.number("mscale_all_dim", 0.0, _MOST, default=0.0)
    if mscale_all_dim:
        mscale = section.number("mscale", 1e-6, _MOST)
    else:
        # Transformers ignores mscale unless mscale_all_dim is there too.
        section.number("mscale", 0.0, _MOST, default=1.0)
        mscale = 1.0
    return Rotary(
        rotary_base=base,
        rope_type="yarn",
        rotary_scaling_factor=section.number("factor", 1.0, _MOST),
        original_max_position_embeddings=section.integer(
            "original_max_position_embeddings", _MOST_POSITIONS
        ),
        # Transformers takes the default for 0.
        beta_fast=section.number("beta_fast", 1e-6, _MOST, default=32.0),
        beta_slow=section.number("beta_slow", 1e-6, _MOST, default=1.0),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )


def _base(fields: Fields) -> float:
    return fields.number("rope_theta", 1e-6, _MOST, default=10000.0)
