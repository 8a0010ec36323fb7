"""Megatron's own MLA, and whole weights in the layout of its checkpoints."""

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from absorbed_mla.standard_mla import get_standard_mla_layer_spec
from tests.oracle import OracleMLA, OracleResult
from tests.support import world
from tests.support.cases import config_for
from tests.support.harness import PARAMETERS, Setup, rank_weights
from tests.support.layouts import Layout

KV_UP = "linear_kv_up_proj.weight"
# Names of the latent norms in TransformerEngine's fused layers.
FUSED = {
    "q_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
    "kv_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
}


def interleave_heads(mla: OracleMLA, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """Rows of linear_kv_up_proj: head by head, first its keys', then its values' rows."""
    rows = []
    for head in range(w_uk.shape[0] // mla.nope):
        rows.append(w_uk[head * mla.nope : (head + 1) * mla.nope])
        rows.append(w_uv[head * mla.v : (head + 1) * mla.v])
    return torch.cat(rows)


def separate_heads(mla: OracleMLA, kv_up: Tensor) -> tuple[Tensor, Tensor]:
    """The keys' and the values' rows of a linear_kv_up_proj, or of its gradient."""
    per_head = kv_up.split([mla.nope, mla.v] * (kv_up.shape[0] // (mla.nope + mla.v)))
    return torch.cat(per_head[0::2]), torch.cat(per_head[1::2])


def standard_state_dict(
    mla: OracleMLA, setup: Setup, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """This rank's state dict of MLASelfAttention with local norms."""
    parts = {n: p.to(setup.dtype) for n, p in rank_weights(setup, weights).items()}
    combined = interleave_heads(mla, parts.pop("w_uk"), parts.pop("w_uv"))
    return {**{PARAMETERS[n][0][0]: p.clone() for n, p in parts.items()}, KV_UP: combined}


def build_standard(mla: OracleMLA, setup: Setup) -> nn.Module:
    """Megatron's attention; its latent norms use the epsilon of the config."""
    config = config_for(
        mla,
        setup.dtype,
        layernorm_epsilon=mla.norm_eps,
        transformer_impl=setup.backend,
        use_cpu_initialization=setup.backend == "local",
    )
    spec = get_standard_mla_layer_spec(config, backend=setup.backend).submodules.self_attention
    attention = build_module(spec, config=config, layer_number=1)
    assert type(attention).__module__ == "megatron.core.transformer.multi_latent_attention"
    assert attention.attn_mask_type == AttnMaskType.causal
    return attention.to(world.device())


def load_standard(
    attention: nn.Module, mla: OracleMLA, setup: Setup, weights: dict[str, Tensor]
) -> None:
    """Load this rank's part of every whole weight into Megatron's attention."""
    names = dict(attention.named_parameters())
    state = standard_state_dict(mla, setup, weights)
    state = {FUSED[n] if FUSED.get(n) in names else n: part for n, part in state.items()}
    missing = attention.load_state_dict(state, strict=False)
    left_out = [key for key in missing.missing_keys if not key.endswith("_extra_state")]
    if missing.unexpected_keys or left_out:
        raise AssertionError(f"unexpected {missing.unexpected_keys}, missing {left_out}")


def run_standard(
    attention: nn.Module, mla: OracleMLA, layout: Layout, x: Tensor, output_grad: Tensor
) -> OracleResult:
    """Forward and backward of Megatron's attention in one process; gradients by oracle name."""
    parameters = dict(attention.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    x = x.to(world.device(), dtype).clone().requires_grad_()
    packed = layout.packed_seq_params(world.device())
    output, _ = attention(x, None, packed_seq_params=packed)
    output.backward(output_grad.to(world.device(), dtype))
    separate = {fused: name for name, fused in FUSED.items()}
    gradients = {separate.get(n, n): p.grad.cpu() for n, p in parameters.items()}
    w_uk, w_uv = separate_heads(mla, gradients.pop(KV_UP))
    oracle_names = {names[0]: n for n, (names, _) in PARAMETERS.items()}
    named = {"w_uk": w_uk, "w_uv": w_uv, **{oracle_names[n]: g for n, g in gradients.items()}}
    rows = [t.detach().reshape(-1, mla.hidden).cpu() for t in (output, x.grad)]
    return OracleResult(*rows, named)
