"""Small GPT models with absorbed or standard MLA, a batch for them, and their logits."""

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.oracle import OracleMLA
from tests.support import world
from tests.support.cases import TINY, config_for, model_options

VOCAB, TOKENS, BATCH = 64, 16, 2
BLOCK_SPECS = {
    "absorbed": get_absorbed_mla_decoder_block_spec,
    "standard": get_standard_mla_decoder_block_spec,
}
# One dense layer and two MoE layers.
MIXED = {
    "num_layers": 3,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1],
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}


def gpt_model(
    kind: str = "absorbed",
    mla: OracleMLA = TINY,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spec=None,
    mtp_block_spec=None,
    **config_changes,
) -> GPTModel:
    """A model on this process's device; ``seed`` determines its weights."""
    config = config_for(mla, dtype, **config_changes)
    if spec is None:
        of_model = (
            {} if kind == "standard" else {"options": AbsorbedMLAOptions(**model_options(mla))}
        )
        spec = BLOCK_SPECS[kind](config, backend=config.transformer_impl, **of_model)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp_block_spec,
        vocab_size=VOCAB,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
    )
    return model.to(world.device(), dtype)


@torch.no_grad()
def with_own_norms(model: nn.Module, seed: int) -> nn.Module:
    """The model with random gains in place of ones, which are the same for every norm."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


def token_batch(seed: int = 5) -> Tensor:
    """Token ids [BATCH, TOKENS]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (BATCH, TOKENS), generator=generator, device="cpu")
    return tokens.to(world.device())


def call(model: nn.Module, **arguments) -> Tensor:
    """Logits of this rank's vocabulary, or per-token losses where ``labels`` are given."""
    tokens = token_batch()
    positions = torch.arange(TOKENS, device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, **arguments)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """Whole logits [BATCH, TOKENS, VOCAB]."""
    return whole_logits(model, token_batch())


def whole_logits(model: nn.Module, tokens: Tensor, first: int = 0, **arguments) -> Tensor:
    """Of tokens [B, S], which are at positions from ``first`` on, over all ranks [B, S, VOCAB]."""
    positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
    own = model(tokens, positions.expand_as(tokens), None, **arguments)
    return tensor_parallel.gather_from_tensor_model_parallel_region(own)
