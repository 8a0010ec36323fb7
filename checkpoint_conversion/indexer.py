"""The indexer of sparse attention: fields of config.json and Megatron's arguments, and back.

Models whose config.json has one are DeepSeek-V3.2 and GLM-5. They compute alike, but for the order
of the rotated channels, which come first in a head of the indexer: in halves (V3.2), or as pairs of
neighbours (GLM-5). Megatron has an option for it, so that no weight is permuted. In transformers
both have a ReLU, and 1e-6 as the epsilon of the keys' norm whatever ``rms_norm_eps`` is.

Layers may share the selection of an earlier one (GLM-5.2); these have no indexer of their own. A
multi-token-prediction layer always has one, as Megatron numbers these layers from 1 again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint_conversion.config_fields import (
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_WIDTH,
    Fields,
)
from checkpoint_conversion.model_type import ModelType, SparseAttention, convertible, of_arguments

K_NORM_EPSILON = 1e-6
_DIMENSIONS = {
    "heads": ("index_n_heads", "dsa_indexer_n_heads", MOST_HEADS),
    "width": ("index_head_dim", "dsa_indexer_head_dim", MOST_WIDTH),
    "topk": ("index_topk", "dsa_indexer_topk", MOST_POSITIONS),
}
_TYPES = {"full": True, "shared": False, "F": True, "S": False}


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The indexers of a model.

    Attributes:
        heads: Of one indexer.
        width: Of one head; the first ``qk_rope_head_dim`` channels are rotated.
        topk: Keys that a query attends to.
        topk_freq: Every ``topk_freq``-th layer has an indexer, those between share its selection.
        skip_topk_offset: Number of first layers that all have one; 1 if no layer shares.
    """

    heads: int
    width: int
    topk: int
    topk_freq: int = 1
    skip_topk_offset: int = 1

    def selects(self, layer: int) -> bool:
        """Whether the decoder layer of this number, from 0, has an indexer of its own."""
        return max(layer + 1 - self.skip_topk_offset, 0) % self.topk_freq == 0


def read_indexer(fields: Fields, model: ModelType, layers: int) -> Indexer | None:
    """Read config.json; None for a model type that has no indexer.

    Args:
        fields: Of the whole file; what cannot be converted is recorded as a problem.
        model: Its model type.
        layers: Number of decoder layers.
    """
    if model.sparse is None:
        having = " and ".join(name for name, one in convertible().items() if one.sparse)
        for name, _, _ in _DIMENSIONS.values():
            fields.only(name, None, f"left out: sparse attention is that of {having}")
        return None
    sizes = {size: fields.integer(name, most) for size, (name, _, most) in _DIMENSIONS.items()}
    rope = fields.raw("qk_rope_head_dim")
    if isinstance(rope, int) and sizes["width"] < rope:
        fields.wrong("index_head_dim", f"at least qk_rope_head_dim {rope}")
    if fields.null("q_lora_rank"):
        fields.problems.append(
            "q_lora_rank must be an integer: the indexer reads the compressed query; got null"
        )
    interleaved = model.sparse.interleaved
    if fields.boolean("indexer_rope_interleave", interleaved) != interleaved:
        fields.wrong("indexer_rope_interleave", f"{str(interleaved).lower()} in {model.name}")
    source, (freq, offset) = _read_schedule(fields, layers)
    if freq > 1 and not model.sparse.shared:
        fields.wrong(source, f"left out: every layer of a {model.name} has an indexer")
    return Indexer(**sizes, topk_freq=freq, skip_topk_offset=offset)


def _read_schedule(fields: Fields, layers: int) -> tuple[str, tuple[int, int]]:
    """The field that decides, ``topk_freq`` and ``skip_topk_offset``."""
    source = next(filter(fields.given, ("indexer_types", "index_topk_pattern")), None)
    if source is not None:
        kinds = fields.raw(source)
        known = isinstance(kinds, list | str) and all(
            isinstance(kind, str) and kind in _TYPES for kind in kinds
        )
        if not known or len(kinds) != layers:
            fields.wrong(source, f"a list of {layers}, each 'full' or 'shared'")
            return source, (1, 1)
        selects = [_TYPES[kind] for kind in kinds]
    else:
        source = "index_topk_freq"
        freq = fields.integer(source, MOST_LAYERS, default=1)
        # The default of transformers.
        offset = fields.integer("index_skip_topk_offset", MOST_LAYERS, least=0, default=2)
        selects = [max(layer + 1 - offset, 0) % freq == 0 for layer in range(layers)]
    found = schedule_of(selects)
    if found is None:
        fields.wrong(
            source, "some first layers with an indexer, then every N-th: Megatron has no other"
        )
    return source, found or (1, 1)


def schedule_of(selects: Sequence[bool]) -> tuple[int, int] | None:
    """``topk_freq`` and ``skip_topk_offset`` of layers with (True) and without an indexer.

    (1, 1) if all have one; None for a pattern that no such numbers describe.
    """
    if all(selects):
        return 1, 1
    offset = list(selects).index(False)
    later = [layer for layer in range(offset, len(selects)) if selects[layer]]
    # Without a later one, any number beyond the last layer says so.
    freq = (later[0] if later else len(selects)) + 1 - offset
    one = Indexer(heads=1, width=1, topk=1, topk_freq=freq, skip_topk_offset=offset)
    if not offset or any(one.selects(layer) != found for layer, found in enumerate(selects)):
        return None
    return freq, offset


def indexer_args(indexer: Indexer | None, sparse: SparseAttention | None) -> dict[str, object]:
    """Megatron's arguments; none for a model without sparse attention."""
    if indexer is None or sparse is None:
        return {}
    power_of_two = indexer.width & (indexer.width - 1) == 0
    return {
        "experimental_attention_variant": "dsa",
        **{argument: getattr(indexer, size) for size, (_, argument, _) in _DIMENSIONS.items()},
        "dsa_indexer_topk_freq": indexer.topk_freq,
        "dsa_indexer_skip_topk_offset": indexer.skip_topk_offset,
        "dsa_indexer_rope_interleaved": sparse.interleaved,
        # DeepSeek's own code has the Hadamard transform; products of queries and keys keep their
        # values, so that it says nothing about the weights.
        "dsa_indexer_rotate_activation": not sparse.interleaved and power_of_two,
        "dsa_indexer_scoring_relu": True,
        "dsa_indexer_k_norm_epsilon": K_NORM_EPSILON,
    }


def read_indexer_args(fields: Fields, norm_epsilon: float) -> dict[str, object]:
    """Fields of config.json from Megatron's arguments; none without sparse attention.

    Args:
        fields: Of the arguments; what no Hugging Face model has is recorded as a problem.
        norm_epsilon: The default of ``dsa_indexer_k_norm_epsilon``.
    """
    if not has_indexer_args(fields):
        return {}
    config: dict[str, object] = {
        name: fields.integer(argument, most) for name, argument, most in _DIMENSIONS.values()
    }
    if not fields.boolean("dsa_indexer_scoring_relu", default=True):
        fields.wrong("dsa_indexer_scoring_relu", "True, as in the models of transformers")
    epsilon = "dsa_indexer_k_norm_epsilon"
    if fields.number(epsilon, 1e-12, 1.0, default=norm_epsilon) != K_NORM_EPSILON:
        accepted = f"{K_NORM_EPSILON:g}, as in the models of transformers"
        fields.wrong(epsilon, accepted)
    freq = fields.integer("dsa_indexer_topk_freq", MOST_LAYERS, default=1)
    offset = fields.integer("dsa_indexer_skip_topk_offset", MOST_LAYERS, least=0, default=0)
    layers = fields.raw("num_layers")
    if fields.boolean("dsa_indexer_rope_interleaved", default=False):
        config["indexer_rope_interleave"] = True
    if freq == 1 or not isinstance(layers, int):
        return config
    sparse = sparse_model(fields).sparse
    if sparse is None or not sparse.shared:
        fields.wrong(
            "dsa_indexer_topk_freq",
            "1 without dsa_indexer_rope_interleaved: every layer of DeepSeek-V3.2 has an indexer",
        )
    one = Indexer(heads=1, width=1, topk=1, topk_freq=freq, skip_topk_offset=max(offset, 1))
    types = ["full" if one.selects(layer) else "shared" for layer in range(layers)]
    return config | {
        "indexer_types": types,
        "index_topk_freq": freq,
        "index_skip_topk_offset": one.skip_topk_offset,
    }


def has_indexer_args(fields: Fields) -> bool:
    """Whether Megatron's arguments are of a model with sparse attention."""
    return fields.equals("experimental_attention_variant", "dsa")


def sparse_model(fields: Fields) -> ModelType:
    """The model type of Megatron's arguments with sparse attention."""
    interleaved = fields.equals("dsa_indexer_rope_interleaved", True)
    return of_arguments("sigmoid", interleaved)
