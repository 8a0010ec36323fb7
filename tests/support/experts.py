"""Models with grouped experts beside the same models with Megatron's own."""

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.serving.experts.layer import group_experts
from absorbed_mla.serving.experts.permuted_tokens import PermutedTokens
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.weights.load import load_model
from checkpoint_conversion.formats.base import Checkpoint
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.support.backends import determinism
from tests.support.cases import TINY, config_for
from tests.support.models import MIXED, gpt_model, whole_logits
from tests.support.parity import tokens_of, trained

# DeepSeek-V3's routing: a bias that only chooses, and experts of two of four groups.
ROUTED = {
    **MIXED,
    "num_moe_experts": 8,
    "moe_router_topk": 3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_dtype": "fp32",
}
# One choice or two: their sum is the same in any order, so equality is to the bit.
FEW = {**MIXED, "moe_router_topk": 2, "activation_func": torch.nn.functional.silu}


def grouped_model(*, dtype: torch.dtype = torch.float32, **fields) -> GPTModel:
    """As ``gpt_model``, with grouped experts; in evaluation mode."""
    config = config_for(TINY, dtype, **fields)
    spec = get_absorbed_mla_decoder_block_spec(config, backend=config.transformer_impl)
    return gpt_model(dtype=dtype, spec=group_experts(spec), **fields).eval()


def pair(*, dtype: torch.dtype = torch.float32, **fields) -> tuple[GPTModel, GPTModel]:
    """A model with Megatron's experts and one with grouped experts, with the same weights."""
    sequential = gpt_model(dtype=dtype, **fields).eval()
    # Both choose other experts than without it.
    for name, buffer in sequential.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(0.3, -0.3, len(buffer)).to(buffer))
    grouped = grouped_model(dtype=dtype, **fields)
    grouped.load_state_dict(sequential.state_dict())
    return sequential, grouped


def generated_and_trained(
    checkpoint: Checkpoint, device: torch.device, parts: int | None
) -> tuple[Tensor, Tensor]:
    """Logits in parity mode: of grouped experts, and of a training forward of Megatron's."""
    options = {"parity": True, "tensor_parallel_parts": parts, "tensor_parallel_size": 1}
    with batch_invariant_mode(device.type, parts), determinism(True, warn_only=True):
        grouped, sequential = (
            load_model(checkpoint, LLMOptions(experts=experts, **options), device)
            for experts in ("grouped", "sequential")
        )
        with torch.inference_mode():
            found = whole_logits(grouped, tokens_of())
        return found, trained(sequential, tokens_of())


@torch.no_grad()
def activations(monkeypatch, sequential, grouped, gate_and_up: Tensor) -> tuple[Tensor, Tensor]:
    """What Megatron's MoE layer and the grouped one make of [R, 2 F] for the second product."""
    expert, device = sequential.experts.local_experts[0], gate_and_up.device
    for product in (expert.linear_fc1, expert.linear_fc2):
        monkeypatch.setattr(product, "forward", lambda x: (x, None))
    generator = torch.Generator().manual_seed(0)
    topk = 2
    chosen = torch.randint(4, (len(gate_and_up) // topk, topk), generator=generator).to(device)
    probs = torch.rand(chosen.shape, generator=generator).to(device)
    rows = PermutedTokens.of(chosen, 4)
    expected, _ = expert(gate_and_up, rows.choices_of(probs))
    return grouped.experts._activated(gate_and_up.clone(), rows, probs), expected


def signs_of_zero(rows: int, width: int) -> Tensor:
    """Random gates and ups [rows, 2 * width], many of which are 0 or -0."""
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1))
    x[::2, ::3] = 0.0
    x[:, width::4] = -0.0
    return x
