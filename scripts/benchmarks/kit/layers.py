"""An attention layer, ours or Megatron's, with its input; memory and traffic of one step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla import AbsorbedMLAOptions
from benchmarks.kit.processes import Processes
from benchmarks.kit.report import Refused, refusing
from benchmarks.kit.traffic import Traffic, count_traffic
from specs.absorbed_mla_layer_specs import get_absorbed_mla_layer_spec

# DeepSeek-V3's scaling of its rotary embedding.
YARN = {
    "rotary_scaling_factor": 40,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True)
class Subject:
    """A layer with an input of this rank."""

    layer: nn.Module  # Megatron's attention, or transformer layer
    x: Tensor  # [tokens / cp, 1, hidden], requires a gradient
    output_grad: Tensor  # like x
    packed: PackedSeqParams | None  # boundaries of the whole pack, None for one sequence

    def forward(self) -> Tensor:
        """The output, [tokens / cp, 1, hidden]."""
        with get_fp8_context(self.layer.config):
            return self.layer(self.x, None, packed_seq_params=self.packed)[0]

    def backward(self, output: Tensor) -> None:
        """Gradients of the input and of all parameters."""
        output.backward(self.output_grad)

    def forget_gradients(self) -> None:
        """As after an optimizer step."""
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Observed:
    """Traffic and memory of one step; bytes are None without a GPU."""

    forward: Traffic  # what forward sent to other ranks
    backward: Traffic  # what backward sent
    kept_bytes: int | None  # allocated by forward and not freed before backward
    peak_bytes: int | None  # the most allocated during the step


def observe(subject: Subject, processes: Processes) -> Observed:
    """Run one step for its traffic and memory; before and afterwards there are no gradients."""
    on_gpu = processes.on_gpu
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with count_traffic() as forward:
        output = subject.forward()
    kept = torch.cuda.memory_allocated() - before if on_gpu else None
    with count_traffic() as backward:
        subject.backward(output)
    processes.synchronize()
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    subject.forget_gradients()
    return Observed(forward, backward, kept, peak)


def build(
    config: MLATransformerConfig,
    options: AbsorbedMLAOptions | None,
    processes: Processes,
    tokens: int,
    packed: PackedSeqParams | None,
    whole: bool = False,
) -> Subject:
    """The layer in training mode, and random input, on this process's device.

    Args:
        config: Of the layer, see :func:`layer_config`.
        options: Of ours; None for Megatron's layer.
        processes: For the device and random values.
        tokens: Of this rank.
        packed: Boundaries of the whole pack; None for one sequence.
        whole: Whether it is a transformer layer, and not its attention alone.

    Raises:
        Refused: If it cannot be built here.
    """
    if options is None:
        if not HAVE_TE:
            raise Refused("Megatron's standard MLA needs transformer-engine, not installed here")
        spec = get_gpt_layer_with_transformer_engine_spec(
            multi_latent_attention=True, qk_layernorm=config.qk_layernorm
        )
    else:
        with refusing(ValueError):
            spec = get_absorbed_mla_layer_spec(
                config, backend=config.transformer_impl, options=options
            )
    part, more = spec, {}
    if not whole:
        part, more = spec.submodules.self_attention, {"cp_comm_type": config.cp_comm_type}
    layer = build_module(part, config=config, layer_number=1, **more).to(processes.device)
    shape = (tokens, 1, config.hidden_size)
    x = processes.random(*shape).requires_grad_()
    return Subject(layer.train(), x, processes.random(*shape), packed)


def layer_config(
    args: argparse.Namespace,
    processes: Processes,
    *,
    heads: int,
    recompute: str | None,
    cp_comm_type: str | None = None,
    fp8_recipe: str | None = None,
    **fields: Any,
) -> MLATransformerConfig:
    """Megatron's config of one layer: TransformerEngine's on a GPU, a local one on a CPU.

    Args:
        args: For the dimensions.
        processes: For device, dtype and context-parallel size.
        heads: Of the layer.
        recompute: Module that is recomputed in backward, or None.
        cp_comm_type: How ranks exchange keys under context parallelism.
        fp8_recipe: Scales of linear layers in FP8; None for none.
        fields: Others of the config.

    Raises:
        Refused: If there is no FP8 here.
    """
    if fp8_recipe and not (HAVE_TE and processes.on_gpu):
        raise Refused("FP8 needs transformer-engine and a GPU")
    fp8 = {"fp8": "hybrid", "fp8_recipe": fp8_recipe} if fp8_recipe else {}
    return MLATransformerConfig(
        num_layers=1,
        num_attention_heads=heads,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.hidden_size,
        q_lora_rank=args.q_lora_rank,
        kv_lora_rank=args.kv_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
        qk_layernorm=True,
        rope_type="rope",
        rotary_base=10000,
        **YARN,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=processes.dtype,
        bf16=processes.dtype == torch.bfloat16,
        transformer_impl="transformer_engine" if HAVE_TE and processes.on_gpu else "local",
        use_cpu_initialization=not processes.on_gpu,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        recompute_granularity="selective" if recompute else None,
        recompute_modules=[recompute] if recompute else None,
        context_parallel_size=processes.size,
        cp_comm_type=cp_comm_type,
        **fp8,
        **fields,
    )


def pack(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Documents of these lengths, one after the other."""
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def pack_for_ranks(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """The same for context parallelism, where TransformerEngine reads the padded bounds."""
    packed = pack(lengths, device)
    packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = packed.cu_seqlens_q
    return packed
