"""Rotary position embeddings as config.json describes them, in either of transformers' styles.

rope_theta, rope_scaling     transformers 4
rope_parameters              transformers 5, with rope_theta inside
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint_conversion.config_fields import Fields, shown

_MOST_POSITIONS = 2**31
_MOST = 1e12


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Fields have the names of Megatron's options.

    Without YaRN the factor is 1, and then the others have no effect.

    Attributes:
        rope_type: ``"rope"`` or ``"yarn"``.
        mscale: Of cosine and sine, together with ``mscale_all_dim``.
        mscale_all_dim: Of the softmax scale.
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
        """The fields of config.json, in the style that all releases of transformers read."""
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
    """Read the embedding from the fields of config.json.

    Args:
        fields: Of the whole file.
        part: What ``partial_rotary_factor`` has to be where it is given.
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
    # Transformers knows these for YaRN; Megatron's MLA has nothing like them.
    for name, neutral in (("attention_factor", None), ("truncate", True)):
        if section.given(name) and section.raw(name) is not neutral:
            section.wrong(name, "left out: Megatron's MLA has no such option")
    mscale_all_dim = section.number("mscale_all_dim", 0.0, _MOST, default=0.0)
    if mscale_all_dim:
        mscale = section.number("mscale", 1e-6, _MOST)
    else:
        # Transformers scales by the factor alone unless both are there.
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
