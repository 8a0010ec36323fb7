"""Megatron's builder of GPT models, with absorbed MLA in the layers of multi-token prediction too.

It stands on ``megatron.training``, which megatron-core's wheel has for Python 3.12 and newer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.models import gpt as host
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

from absorbed_mla.megatron_names import BUILDER, GPT_BUILDER, MTP_BLOCK_SPEC
from absorbed_mla.unsupported import refuse_tied_embeddings_beside_mtp
from specs.absorbed_mla_mtp_specs import mtp_block_of
from specs.absorbed_mla_parts import LayerParts, parts_of


class AbsorbedMLAGPTModelBuilder(GPTModelBuilder):
    """Builds GPT models whose decoder and MTP layers have the same absorbed MLA.

    Megatron's own builder makes the spec of MTP's layers by itself, with standard MLA whatever the
    decoder's layers are. Everything else is Megatron's. Choose it by the model config's attribute
    ``builder``, ``"specs.absorbed_mla_gpt_builder.AbsorbedMLAGPTModelBuilder"``.

    Args:
        model_config: Megatron's; its ``transformer_layer_spec`` is one of
            ``specs.absorbed_mla_layer_specs`` or a function that returns one.

    Raises:
        ValueError: If there is no ``transformer_layer_spec``, or this release of Megatron makes the
            spec of MTP's layers by another function.
    """

    def __init__(self, model_config: GPTModelConfig) -> None:
        super().__init__(model_config)
        if model_config.transformer_layer_spec is None:
            raise _no_absorbed_mla(None)
        GPT_BUILDER.require({BUILDER: host})
        self._built_from = model_config

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """The model of one pipeline stage; arguments are those of Megatron's builder.

        Raises:
            ValueError: If the decoder's spec is not one of absorbed MLA, or the last one of several
                stages has MTP and an output layer that is tied to the embedding.
        """
        made = self._built_from
        refuse_tied_embeddings_beside_mtp(
            made.transformer, made.share_embeddings_and_output_weights
        )
        with _mtp_like_the_decoder():
            return super().build_model(pg_collection, pre_process, post_process, vp_stage)


@contextlib.contextmanager
def _mtp_like_the_decoder() -> Iterator[None]:
    """Have Megatron ask us for the spec of the MTP layers."""
    original = MTP_BLOCK_SPEC.of(host)
    MTP_BLOCK_SPEC.replace(host, _mtp_block_spec)
    try:
        yield
    finally:
        MTP_BLOCK_SPEC.replace(host, original)


def _mtp_block_spec(
    config: GPTModelConfig,
    transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """What Megatron calls instead of its own function, with the decoder's spec."""
    parts = _decoder_parts(transformer_layer_spec)
    if parts is None:
        raise _no_absorbed_mla(transformer_layer_spec)
    if not config.mtp_num_layers:
        return None
    return mtp_block_of(parts, config.transformer, vp_stage)


def _decoder_parts(spec: ModuleSpec | TransformerBlockSubmodules) -> LayerParts | None:
    if isinstance(spec, TransformerBlockSubmodules):
        # A block that somebody put together of our layers knows no parts.
        layers = [parts_of(layer) for layer in spec.layer_specs or ()]
        return getattr(spec, "parts", None) or (layers[-1] if layers else None)
    return parts_of(spec)


def _no_absorbed_mla(spec: object) -> ValueError:
    return ValueError(
        "AbsorbedMLAGPTModelBuilder needs a transformer_layer_spec of "
        f"specs.absorbed_mla_layer_specs (--spec), got {spec!r}"
    )
