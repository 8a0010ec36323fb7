"""Schema of ``models/``: a Hugging Face ``model_type``, its config fields, tensor names and router.

Each file of ``models/`` declares one, found by its name. Whatever a declaration leaves out is as in
DeepSeek-V3, whose names of fields and tensors are those of the converter's tables.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from absorbed_mla.registry import Registry
from checkpoint_conversion.config_fields import Fields
from checkpoint_conversion.refused_models import REFUSED, Refused


class FixedValue(NamedTuple):
    """The one value that a field may have.

    Attributes:
        value: None: the field must be left out.
        why: What other values would mean; None where the value says it.
    """

    value: object
    why: str | None = None

    @property
    def accepted(self) -> str:
        """How an error says it."""
        value = "left out" if self.value is None else repr(self.value)
        return f"{value}: {self.why}" if self.why else value


# Other values add tensors or change what tensors mean, in every model.
_ONLY = {
    "attention_bias": FixedValue(False),
    "mlp_bias": FixedValue(False),
    "hidden_act": FixedValue("silu"),
}


@dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """The indexer of a model type.

    Attributes:
        interleaved: Whether its rotated channels are pairs of neighbours, or two halves.
        shared: Whether layers may share the selection of an earlier one.
    """

    interleaved: bool
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """A model type that can be converted.

    Attributes:
        name: As config.json has it; the name of the file.
        also: What config.json may have instead.
        summary: What it is, for the table of models in the documentation.
        released: Checkpoints of it.
        architectures: Accepted in config.json, the first one is written. It begins with the name
            that the classes of transformers have.
        config_class: Name of the class of its config in transformers; None: as the models'.
        fields: DeepSeek-V3's names of fields -> those of this config.json, where they differ.
        aliases: The same -> those that released files have in their place.
        defaults: Values of fields that config.json leaves out, as transformers has them. None for
            ``v_head_dim``: what ``hidden_size`` has for each head.
        only: Fields of which one value can be converted, beside those of every model. A dot
            separates the name of a section from that of its field.
        rope_types: Accepted in ``rope_parameters``. Without ``"default"`` it must be there.
        scales_queries: Whether ``rope_parameters`` may have a ``llama_4_scaling_beta``.
        rope_interleave: Whether rotary channels are pairs of neighbours, as Megatron's, or halves.
        mup: Whether it scales embeddings, residual branches and logits (``mup.py``).
        rotary_part_of_head: Whether ``partial_rotary_factor`` counts all channels of a query's
            head, or those of the rotary part alone.
        experts: Whether layers may be mixtures of experts.
        lists_layers: Whether ``mlp_layer_types`` may say which layers are mixtures of experts.
        scoring_func: Of the router: ``"sigmoid"`` or ``"softmax"``.
        topk_methods: Accepted ways of choosing experts, the default first. With ``"noaux_tc"``
            there is an ``e_score_correction_bias``.
        ignores_norm_topk_prob: What to say where config.json has ``norm_topk_prob``, if
            transformers ignores it and never divides scores by their sum; None: it reads it.
        post_mlp_layernorm: Whether the sum of routed and shared experts passes a norm. Of dense
            layers, files may have one that nothing reads.
        sparse: The indexer; None for dense attention.
        layer: What begins the names of a layer's tensors; ``{layer}`` is its number.
        tensors: The table's names of tensors (``mapping_table.py``, after ``layer``) -> those of
            this model's files, where they differ.
        stacks: Tensors with all experts of a layer -> the table's names of those of one expert.
        may_be_missing: The table's names of tensors that files may leave out, which are zero then.
        from_arguments: Whether Megatron's arguments without a config.json become this one, if
            router, indexer, scaling of queries and norm of experts fit.
    """

    name: str
    also: tuple[str, ...] = ()
    summary: str
    released: tuple[str, ...] = ()
    architectures: tuple[str, ...]
    config_class: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, FixedValue] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ("yarn", "default")
    scales_queries: bool = False
    rope_interleave: bool = True
    mup: bool = False
    rotary_part_of_head: bool = False
    experts: bool = True
    lists_layers: bool = False
    scoring_func: str = "sigmoid"
    topk_methods: tuple[str, ...] = ("noaux_tc",)
    ignores_norm_topk_prob: str | None = None
    post_mlp_layernorm: bool = False
    sparse: SparseAttention | None = None
    layer: str = "model.layers.{layer}."
    tensors: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    may_be_missing: tuple[str, ...] = ()
    from_arguments: bool = False

    @property
    def all_only(self) -> dict[str, FixedValue]:
        """``only``, with what no model may have otherwise."""
        return {**_ONLY, "rope_interleave": FixedValue(self.rope_interleave), **self.only}

    @property
    def transformers_class(self) -> str:
        """What begins the names of its classes in transformers."""
        return self.architectures[0].removesuffix("ForCausalLM")

    @property
    def transformers_config(self) -> str:
        """Name of the class of its config in transformers."""
        return self.config_class or f"{self.transformers_class}Config"

    @property
    def router_bias(self) -> bool:
        """Whether routers have an ``e_score_correction_bias``."""
        return "noaux_tc" in self.topk_methods


@dataclass(frozen=True, kw_only=True)
class TextAndImages:
    """A model type of text and images, of which the text model can be converted.

    Attributes:
        name: As config.json has it; the name of the file.
        summary: What it is, for the table of models in the documentation.
        released: Checkpoints of it.
        text_model: Model type of a ``text_config`` that does not say it.
        prefix: What begins the names of the text model's tensors.
        images: What begins those of all others.
        renamed: Beginnings of names after ``prefix`` -> what the text model alone calls them.
    """

    name: str
    summary: str
    released: tuple[str, ...] = ()
    text_model: str
    prefix: str
    images: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)

    def text_name(self, name: str) -> str:
        """The name of a text model's tensor in a file that holds the text model alone."""
        if not name.startswith(self.prefix):
            return name
        name = name.removeprefix(self.prefix)
        for stored, alone in self.renamed.items():
            if name.startswith(stored):
                return alone + name.removeprefix(stored)
        return name


MODELS: Registry[ModelType | TextAndImages | Refused] = Registry(
    "model_type", "checkpoint_conversion.models"
)
for _refused in REFUSED:
    MODELS.register(_refused)


def find_model_type(name: object) -> ModelType | TextAndImages | Refused | None:
    """The declaration of a model type; None if there is none of that name."""
    if isinstance(name, str) and name in MODELS.names():
        return MODELS[name]
    return next((one for one in MODELS if name in getattr(one, "also", ())), None)


def convertible() -> dict[str, ModelType]:
    """The model types that can be converted, by name."""
    return {model.name: model for model in MODELS if isinstance(model, ModelType)}


@functools.cache
def model_of(name: str) -> ModelType:
    """The model type of a model that is known to be convertible."""
    model = find_model_type(name)
    assert isinstance(model, ModelType), name
    return model


def model_fields(model: ModelType, config: Mapping[str, object]) -> Fields:
    """Fields of a config.json of this model type, under DeepSeek-V3's names."""
    defaults = dict(model.defaults)
    if "v_head_dim" in defaults:
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            defaults["v_head_dim"] = hidden // heads
    return Fields(config, [], names=model.fields, aliases=model.aliases, defaults=defaults)


def of_arguments(
    scoring_func: str,
    interleaved: bool | None,
    scales_queries: bool = False,
    post_mlp_layernorm: bool = False,
) -> ModelType:
    """The model type of Megatron's arguments without a config.json.

    Args:
        scoring_func: Of the router.
        interleaved: Whether an indexer rotates pairs of neighbours; None without an indexer.
        scales_queries: Whether it has a ``llama_4_scaling_beta``.
        post_mlp_layernorm: Whether there is a norm of the experts' output.
    """
    return next(
        model
        for model in convertible().values()
        if model.from_arguments
        and model.scales_queries == scales_queries
        and model.post_mlp_layernorm == post_mlp_layernorm
        and (model.sparse and model.sparse.interleaved) == interleaved
        and (model.sparse or model.scoring_func == scoring_func)
    )


def text_names(model: object, names: Iterable[str]) -> dict[str, str | None]:
    """What a file with the text model alone calls each tensor; None for those of images.

    Args:
        model: Of :func:`find_model_type`.
        names: Of the stored tensors.
    """
    names = list(names)
    if not isinstance(model, TextAndImages):
        # The config.json of a text model may stand beside the tensors of the whole.
        wholes = (one for one in MODELS if isinstance(one, TextAndImages))
        model = next((w for w in wholes if any(n.startswith(w.prefix) for n in names)), None)
    if model is None:
        return {name: name for name in names}
    # Files without the prefix hold the text model alone.
    images = model.images if any(name.startswith(model.prefix) for name in names) else ()
    return {name: None if name.startswith(images) else model.text_name(name) for name in names}
