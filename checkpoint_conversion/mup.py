"""Scales of embeddings, residual branches and logits, which Megatron has as options of MuP.

MiniCPM multiplies embeddings by ``scale_emb``, what each sublayer adds to the residual stream by
s = ``scale_depth`` / sqrt(layers), and logits by ``dim_model_base`` / ``hidden_size``. Of a stream
divided by s, no weight changes: it begins with ``scale_emb`` / s times the embedding, sublayers add
what they compute, and the norms of the stream have their epsilon divided by s^2.
"""

from __future__ import annotations

import math

from checkpoint_conversion.config_fields import MOST, MOST_LAYERS, MOST_WIDTH, Fields

# The argument of Megatron's that turns the others on.
MUP = "use_mup"
_LEAST = 1e-6


def read_scales(fields: Fields) -> tuple[float, dict[str, object]]:
    """From config.json: s, and Megatron's arguments."""
    root = math.sqrt(fields.integer("num_hidden_layers", MOST_LAYERS))
    hidden = fields.integer("hidden_size", MOST_WIDTH)
    # Null means that nothing is scaled; what is missing has a default.
    depth, base = root, hidden
    if not fields.null("scale_depth"):
        depth = fields.number("scale_depth", _LEAST, MOST)
    if not fields.null("dim_model_base"):
        base = fields.integer("dim_model_base", MOST_WIDTH)
    residual = depth / root
    embedding = fields.number("scale_emb", _LEAST, MOST) / residual
    args = {MUP: True, "mup_embedding_mult": embedding, "mup_output_mult": base / hidden}
    return residual, args


def read_scales_args(fields: Fields) -> dict[str, object]:
    """Fields of config.json from Megatron's arguments, with s = 1; none if nothing is scaled."""
    if not fields.boolean(MUP, False):
        return {}
    hidden = fields.integer("hidden_size", MOST_WIDTH)
    fields.only("mup_base_hidden_size", hidden)
    base = fields.number("mup_output_mult", _LEAST, MOST, default=1.0) * hidden
    if base < 0.5 or abs(base - round(base)) > 1e-6:
        fields.wrong("mup_output_mult", f"a whole number divided by hidden_size {hidden}")
    return {
        "scale_emb": fields.number("mup_embedding_mult", _LEAST, MOST, default=1.0),
        "scale_depth": math.sqrt(fields.integer("num_layers", MOST_LAYERS)),
        "dim_model_base": round(base),
    }
