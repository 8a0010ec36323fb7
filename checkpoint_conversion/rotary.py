"""The rotary embedding of a model: config.json and Megatron's arguments, and back.

``rope_theta`` and ``rope_scaling`` are transformers 4's names; transformers 5 has both in
``rope_parameters``, and beside them ``llama_4_scaling_beta``, which scales queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint_conversion.config_fields import MOST, MOST_POSITIONS, MOST_WIDTH, Fields, shown
from checkpoint_conversion.model_type import ModelType

_ORIGINAL = "original_max_position_embeddings"
# Options of absorbed MLA, which Megatron does not have.
LAYER_OPTIONS = BETA, FACTORS = "llama_4_scaling_beta", "rope_factors"
_YARN = (_ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """A rotary embedding; fields are named like Megatron's options.

    Without YaRN ``rotary_scaling_factor`` is 1 and the fields after it have no effect.

    Attributes:
        rope_type: ``"rope"`` or ``"yarn"``.
        mscale: Scales cosine and sine, together with ``mscale_all_dim``.
        mscale_all_dim: Scales the softmax.
        llama_4_scaling_beta: Scales queries beyond the original context; None: none is.
        rope_factors: What LongRoPE divides frequencies by; None: nothing.
    """

    rotary_base: float
    rope_type: str = "rope"
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    llama_4_scaling_beta: float | None = None
    rope_factors: tuple[float, ...] | None = None

    def hugging_face(self) -> dict[str, object]:
        """The fields of config.json, in transformers 4's style, which all releases read.

        Models whose queries are scaled are in transformers 5 only, and have its style.
        """
        scaling: dict[str, object] | None = None
        if self.rope_type == "yarn":
            scaling = {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": self.rotary_scaling_factor,
                **{name: getattr(self, name) for name in _YARN},
            }
        if self.rope_factors is not None:
            scaling = {
                "type": "longrope",
                "rope_type": "longrope",
                "factor": 1.0,
                _ORIGINAL: self.original_max_position_embeddings,
                "short_factor": list(self.rope_factors),
                "long_factor": list(self.rope_factors),
            }
        theta = {"rope_theta": self.rotary_base}
        if scaling is not None and self.llama_4_scaling_beta is not None:
            return {"rope_parameters": {**theta, **scaling, BETA: self.llama_4_scaling_beta}}
        return {**theta, "rope_scaling": scaling}


def read_rotary(fields: Fields, model: ModelType, part: float) -> Rotary:
    """Read the rotary embedding from config.json.

    Args:
        fields: Fields of the whole file.
        model: If ``"default"`` is not among its ``rope_types``, there must be ``rope_parameters``,
            since that is not what transformers takes otherwise.
        part: Value that ``partial_rotary_factor`` must have if it is given.
    """
    _check_part(fields, part)
    if "default" not in model.rope_types and not fields.given("rope_parameters"):
        accepted = " or ".join(map(repr, model.rope_types))
        fields.wrong("rope_parameters", f"an object, with rope_type {accepted}")
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    found = [_read_scaling(fields, one, model, part) for one in (new, old) if one is not None]
    if len(found) == 2 and found[0] != found[1]:
        fields.problems.append(
            "rope_parameters and rope_scaling must agree, got "
            f"{shown(fields.raw('rope_parameters'))} and {shown(fields.raw('rope_scaling'))}"
        )
    return found[0] if found else Rotary(rotary_base=_base(fields))


def _check_part(fields: Fields, part: float) -> None:
    """Record a ``partial_rotary_factor`` that leaves some of the rotary channels as they are."""
    fields.only("partial_rotary_factor", part, f"{part:g}")


def _read_scaling(fields: Fields, section: Fields, model: ModelType, part: float) -> Rotary:
    _check_part(section, part)
    types = model.rope_types
    if not model.scales_queries:
        section.only(BETA, 0, f"left out: transformers does not scale queries of {model.name}")
    base = _base(section if section.given("rope_theta") else fields)
    kind = "rope_type" if section.given("rope_type") else "type"
    chosen = section.choice(kind, types, "default" if "default" in types else None)
    if chosen == "default":
        return Rotary(rotary_base=base)
    if chosen == "longrope":
        return _read_longrope(fields, section, base)
    # Transformers has these for YaRN; Megatron's MLA does not.
    for name, neutral in (("attention_factor", None), ("truncate", True)):
        section.only(name, neutral, "left out: Megatron's MLA has no such option")
    mscale_all_dim = section.number("mscale_all_dim", 0.0, MOST, default=0.0)
    if mscale_all_dim:
        mscale = section.number("mscale", 1e-6, MOST)
    else:
        # Transformers ignores mscale unless mscale_all_dim is there too.
        section.number("mscale", 0.0, MOST, default=1.0)
        mscale = 1.0
    return Rotary(
        rotary_base=base,
        rope_type="yarn",
        rotary_scaling_factor=section.number("factor", 1.0, MOST),
        original_max_position_embeddings=section.integer(_ORIGINAL, MOST_POSITIONS),
        # Transformers takes the default for 0.
        beta_fast=section.number("beta_fast", 1e-6, MOST, default=32.0),
        beta_slow=section.number("beta_slow", 1e-6, MOST, default=1.0),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        llama_4_scaling_beta=read_beta(section),
    )


def _read_longrope(fields: Fields, section: Fields, base: float) -> Rotary:
    # Beyond, transformers takes the long factors for all tokens of a sequence, cached ones, too.
    original = section.integer(_ORIGINAL, MOST_POSITIONS)
    if original < (most := fields.integer("max_position_embeddings", MOST_POSITIONS)):
        section.wrong(_ORIGINAL, f"at least max_position_embeddings {most}: no long_factor is used")
    for name in ("factor", "attention_factor"):
        section.only(name, 1.0)
    pairs = fields.integer("qk_rope_head_dim", MOST_WIDTH) // 2
    return Rotary(
        rotary_base=base,
        original_max_position_embeddings=original,
        rope_factors=section.numbers("short_factor", pairs, 1e-6, MOST),
    )


def read_beta(fields: Fields) -> float | None:
    """Read ``llama_4_scaling_beta``, of Megatron's arguments or of a section of config.json.

    None for 0, too: queries are not scaled.
    """
    return fields.number(BETA, 0.0, MOST, default=0.0) or None


def _base(fields: Fields) -> float:
    return fields.number("rope_theta", 1e-6, MOST, default=10000.0)


def read_rotary_args(fields: Fields) -> Rotary:
    """Read the rotary embedding; what is missing has the default of MLATransformerConfig."""
    factors = None
    if fields.given(FACTORS):
        pairs = fields.integer("qk_pos_emb_head_dim", MOST_WIDTH) // 2
        factors = fields.numbers(FACTORS, pairs, 1e-6, MOST)
    return Rotary(
        rope_type=fields.choice("rope_type", ("rope", "yarn"), "yarn"),
        rotary_base=fields.number("rotary_base", 1e-6, MOST, default=10000),
        rotary_scaling_factor=fields.number("rotary_scaling_factor", 1.0, MOST, default=40.0),
        original_max_position_embeddings=fields.integer(_ORIGINAL, MOST_POSITIONS, default=4096),
        beta_fast=fields.number("beta_fast", 1e-6, MOST, default=32.0),
        beta_slow=fields.number("beta_slow", 1e-6, MOST, default=1.0),
        mscale=fields.number("mscale", 0.0, MOST, default=1.0),
        mscale_all_dim=fields.number("mscale_all_dim", 0.0, MOST, default=0.0),
        llama_4_scaling_beta=read_beta(fields),
        rope_factors=factors,
    )


def check_scaling(fields: Fields, rotary: Rotary) -> None:
    """Record arguments whose rotary embedding no model of transformers has."""
    if rotary.rope_type == "rope" and rotary.llama_4_scaling_beta is not None:
        fields.wrong(BETA, "None with rope_type 'rope'")
    if rotary.rope_type == "yarn" and rotary.rope_factors is not None:
        fields.wrong(FACTORS, "None with rope_type 'yarn'")
    if rotary.rotary_scaling_factor <= 1:
        return
    if rotary.rope_type == "rope" and rotary.mscale_all_dim:
        # Megatron scales the softmax all the same, transformers does not.
        fields.wrong("mscale_all_dim", f"0 with rope_type 'rope' and {_scaling(rotary)}")
    if rotary.rope_type == "yarn" and not rotary.mscale_all_dim and rotary.mscale != 1:
        # Transformers heeds mscale only if both are there.
        fields.wrong("mscale", f"1 with mscale_all_dim 0 and {_scaling(rotary)}")


def _scaling(rotary: Rotary) -> str:
    return f"rotary_scaling_factor {rotary.rotary_scaling_factor:g}"
