"""Converted checkpoints in models of TransformerEngine's layers, loaded by Megatron alone.

Names that only these layers have (fused norms, extra states, grouped experts) must all be in the
checkpoint and nothing else; what the model then predicts is what transformers does.
"""

import dataclasses

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla import AbsorbedMLAOptions
from checkpoint_conversion.checkpoint_folder import weights_folder
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model import ModelConfig
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.conversion.megatron_models import load_strictly
from tests.conversion.models import Architecture, logits_of, make_model, save, token_batch
from tests.distributed.whole import on_one_rank
from tests.support import needs, world
from tests.support.models import whole_logits

pytestmark = needs.gpu_with("TransformerEngine", None if HAVE_TE else "it is not installed")

CASES = [
    # Megatron's own model with TransformerEngine's layers has a query norm that no Hugging Face
    # model has, unless the query is compressed.
    ("standard", "megatron", Architecture("v3", True, True, "yarn")),
    ("standard", "megatron", Architecture("v2", True, False, "rope")),
    ("absorbed", "absorbed", Architecture("v3", True, True, "yarn")),
    ("absorbed", "absorbed", Architecture("v2", False, True, "yarn")),
]


def te_model(config: ModelConfig, attention: str, grouped: bool) -> GPTModel:
    """A GPTModel of TransformerEngine's layers in float32, its weights not yet set."""
    args = to_megatron_args(config, tensor_parallel=world.size(), dtype=torch.float32)
    names = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    fields = MLATransformerConfig(
        **{name: value for name, value in vars(args).items() if name in names}
        | {
            "num_query_groups": None,
            "num_moe_experts": args.num_experts,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "moe_grouped_gemm": grouped,
            "moe_token_dispatcher_type": "alltoall",
            "transformer_impl": "transformer_engine",
            "apply_rope_fusion": False,
            "gradient_accumulation_fusion": False,
        }
    )
    if attention == "standard":
        spec = get_gpt_decoder_block_spec(fields, use_transformer_engine=True)
    else:
        options = AbsorbedMLAOptions(latent_norm_eps=args.latent_norm_epsilon)
        spec = get_absorbed_mla_decoder_block_spec(
            fields, backend="transformer_engine", options=options
        )
    return GPTModel(
        fields,
        transformer_layer_spec=spec,
        vocab_size=config.vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type="rope",
    ).to(world.device())


# Only experts can be grouped.
@pytest.mark.parametrize(
    ("attention", "to", "architecture", "grouped"),
    [(*case, grouped) for case in CASES for grouped in ([False, True] if case[2].moe else [False])],
    ids=str,
)
def test_logits_of_transformers(attention, to, architecture, grouped, folder):
    theirs, tokens = make_model(architecture), token_batch()
    expected = logits_of(theirs, tokens)

    def convert_it() -> None:
        convert(save(theirs, folder / "hf"), folder / to, to, TargetOptions(norms="fused"))

    on_one_rank(convert_it)
    config = open_checkpoint(folder / to).config
    model = te_model(config, attention, grouped).eval()
    # Megatron stacks the layers of a model whose layers are all alike.
    load_strictly(weights_folder(folder / to), model, stacked=len(set(config.moe_layers)) == 1)
    with torch.no_grad():
        logits = whole_logits(model, tokens.to(world.device()))
    error = (logits.cpu() - expected).abs().max() / expected.abs().max()
    print(f"{attention} {architecture.name} TP={world.size()}: {error:.1e}")
    assert error < 1e-4
