"""Scales of embeddings, residual branches and logits, which Megatron has as options of MuP.

MiniCPM multiplies embeddings by ``scale_emb``, what every sublayer adds to the residual stream by
s = ``scale_depth`` / sqrt(layers), and logits by ``dim_model_base`` / ``hidden_size``. Divided by s,
the stream begins with ``scale_emb`` / s times the embedding, every sublayer adds what it computes,
and the norms, which see nothing else of the stream, do the same with their epsilon divided by s^2.
So no weight changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from checkpoint_conversion.config_fields import MOST, MOST_LAYERS, MOST_WIDTH, Fields

# The option of Megatron's that turns the others on.
MUP = "use_mup"
_LEAST = 1e-6


@dataclass(frozen=True, kw_only=True)
class Scales:
    """What embeddings, residual branches and logits are multiplied by."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0

    def args(self) -> dict[str, object]:
        """Megatron's arguments; the norms' epsilon is to be divided by ``residual`` squared."""
        if self == Scales():
            return {MUP: False}
        return {
            MUP: True,
            "mup_embedding_mult": self.embedding / self.residual,
            "mup_output_mult": self.logits,
        }


def read_scales(fields: Fields) -> Scales:
    """Read the scales from config.json."""
    root = math.sqrt(fields.integer("num_hidden_layers", MOST_LAYERS))
    hidden = fields.integer("hidden_size", MOST_WIDTH)
    # Null means that nothing is scaled, what is missing has a default.
    depth, base = root, hidden
    if not fields.null("scale_depth"):
        depth = fields.number("scale_depth", _LEAST, MOST)
    if not fields.null("dim_model_base"):
        base = fields.integer("dim_model_base", MOST_WIDTH)
    embedding = fields.number("scale_emb", _LEAST, MOST)
    return Scales(embedding=embedding, residual=depth / root, logits=base / hidden)


def read_scales_args(fields: Fields) -> dict[str, object]:
    """Fields of config.json from Megatron's arguments; none where it scales nothing."""
    if not fields.boolean(MUP, False):
        return {}
    layers = fields.integer("num_layers", MOST_LAYERS)
    hidden = fields.integer("hidden_size", MOST_WIDTH)
    fields.only("mup_base_hidden_size", hidden)
    base = fields.number("mup_output_mult", 0.0, MOST, default=1.0) * hidden
    if not round(base) or abs(base - round(base)) > 1e-6:
        fields.wrong("mup_output_mult", f"a whole number divided by hidden_size {hidden}")
    return {
        "scale_emb": fields.number("mup_embedding_mult", _LEAST, MOST, default=1.0),
        "scale_depth": math.sqrt(layers),
        "dim_model_base": round(base),
    }
