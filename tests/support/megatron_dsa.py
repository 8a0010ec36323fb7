"""Megatron's own attention with DSA (0.19.2), without TransformerEngine and on a CPU."""

import pytest
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from absorbed_mla.standard_dsa import get_standard_dsa_decoder_block_spec
from tests import oracle_dsa


def attention_spec(config) -> ModuleSpec:
    """Of the layer, whose submodules have the spec of its core attention."""
    block = get_standard_dsa_decoder_block_spec(config)
    return block.layer_specs[0].submodules.self_attention


def transform_on_a_cpu(patch: pytest.MonkeyPatch) -> None:
    """The Hadamard transform, which wants bf16 and a package, as a matrix product."""

    def rotate(x: Tensor) -> Tensor:
        size = x.shape[-1]
        return x @ oracle_dsa.hadamard_matrix(size).to(x.dtype) / size**0.5

    patch.setattr(dsa, "rotate_activation", rotate)
