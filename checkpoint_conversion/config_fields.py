"""Reading config.json: typed fields of an untrusted dictionary, rotary embedding, expert routing.

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
# By model type: scoring_func, and the accepted topk_method, default first.
_SCORING = {
    "deepseek_v2": "softmax",
    "deepseek_v3": "sigmoid",
    "kimi_k2": "sigmoid",
    "glm4_moe_lite": "sigmoid",
    "mistral4": "softmax",
    "deepseek_v32": "sigmoid",
    "glm_moe_dsa": "sigmoid",
}
_METHODS = {
    "deepseek_v2": ("greedy", "group_limited_greedy"),
    "deepseek_v3": ("noaux_tc",),
    "kimi_k2": ("noaux_tc",),
    "glm4_moe_lite": ("noaux_tc",),
    "mistral4": ("greedy",),
    "deepseek_v32": ("noaux_tc",),
    "glm_moe_dsa": ("noaux_tc",),
}


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
        beta_fast=section.number("beta_fast", 0.0, _MOST, default=32.0),
        beta_slow=section.number("beta_slow", 0.0, _MOST, default=1.0),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )


def _base(fields: Fields) -> float:
    return fields.number("rope_theta", 1e-6, _MOST, default=10000.0)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router assigns tokens to experts; fields are named as in config.json.

    Attributes:
        n_group: Number of groups of experts; 1 if selection is not limited to some groups.
        topk_group: Number of groups that a token's experts may come from.
    """

    scoring_func: str
    topk_method: str
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def score_correction(self) -> bool:
        """Whether there is an ``e_score_correction_bias``."""
        return self.topk_method == "noaux_tc"


def read_routing(fields: Fields, model_type: str, num_experts: int) -> Routing:
    """Read the routing of a model with MoE layers from the fields of config.json."""
    scoring, methods = _SCORING[model_type], _METHODS[model_type]
    method = fields.choice("topk_method", methods, methods[0])
    groups = limit = 1
    if method != "greedy":
        groups = fields.integer_or_null("n_group", MOST_EXPERTS) or 1
        limit = fields.integer_or_null("topk_group", MOST_EXPERTS) or 1
    topk = fields.integer("num_experts_per_tok", MOST_EXPERTS)
    if not fields.problems:
        _check_sizes(fields, topk, groups, limit, num_experts)
    unlimited = limit == groups
    return Routing(
        scoring_func=fields.choice("scoring_func", (scoring,), scoring),
        topk_method=method,
        num_experts_per_tok=topk,
        n_group=1 if unlimited else groups,
        topk_group=1 if unlimited else limit,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=model_type != "deepseek_v2"),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
    )


def _check_sizes(fields: Fields, topk: int, groups: int, limit: int, num_experts: int) -> None:
    if topk > num_experts:
        fields.wrong("num_experts_per_tok", f"at most n_routed_experts {num_experts}")
    if num_experts % groups:
        fields.wrong("n_group", f"a divisor of n_routed_experts {num_experts}")
    if limit > groups:
        fields.wrong("topk_group", f"at most n_group {groups}")


def routing_differences(routing: Routing, model_type: str) -> list[str]:
    """Where Megatron's router differs with the same weights, one line each."""
    topk, groups = routing.num_experts_per_tok, routing.topk_group
    notes = []
    if routing.n_group > 1:
        best = 1 if routing.topk_method == "group_limited_greedy" else 2
        # Megatron derives from topk how many experts determine a group's score.
        if topk // groups != best:
            notes.append(
                f"{routing.topk_method} chooses {groups} groups by the best {best} of each group's "
                f"experts; Megatron by the best {topk // groups} (num_experts_per_tok {topk} // "
                f"topk_group {groups})"
            )
    if routing.scoring_func == "sigmoid" and routing.norm_topk_prob == (topk == 1):
        does, not_ = ("does", "does not") if topk > 1 else ("does not", "does")
        notes.append(
            f"norm_topk_prob is {str(routing.norm_topk_prob).lower()}: the model {not_} normalise "
            f"the scores of a token's experts, Megatron {does} with num_experts_per_tok {topk}"
        )
    if model_type == "deepseek_v2" and routing.norm_topk_prob:
        notes.append(
            "norm_topk_prob is true: Megatron normalises the scores of a token's experts "
            "(moe_router_pre_softmax false), transformers ignores the field in DeepSeek-V2"
        )
    return notes
