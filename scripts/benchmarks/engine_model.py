"""Models of engine.py: random weights, equal in all cases but for the attention's."""

from __future__ import annotations

import argparse
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel

    from benchmarks.kit.processes import Processes


@dataclass(frozen=True)
class Case:
    """One way of running all requests.

    Attributes:
        implementation: ``"ours"`` or ``"standard"``, Megatron's MLASelfAttention.
        graphs: Whether steps are replayed from CUDA graphs.
        divided: Whether attention is whole on every rank and the rest divided over Megatron's ranks
            of experts.
    """

    implementation: str
    graphs: bool
    divided: bool = False

    def __str__(self) -> str:
        return f"{self.implementation}, {'CUDA graphs' if self.graphs else 'eager'}"


def build(
    case: Case, args: argparse.Namespace, processes: Processes, dtype: torch.dtype
) -> GPTModel:
    """A model with random weights, in evaluation mode.

    Raises:
        ValueError: If it cannot be built here.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
    from absorbed_mla.serving.data_parallel_attention.model import shard_layers, shard_vocabulary
    from absorbed_mla.serving.scheduler.cuda_graphs import graph_fields, seed_generators
    from benchmarks.kit.layers import mla_config

    config = mla_config(
        args,
        processes,
        dtype,
        num_layers=args.num_layers,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        rotary_scaling_factor=1.0,
        mscale_all_dim=0.0,
        cache_mla_latents=True,
        # A CPU has no CUDA graphs.
        **graph_fields("layer" if case.graphs and processes.on_gpu else None),
        gated_linear_unit=True,
        bias_activation_fusion=False,
    )
    seed_generators(args.seed, graphs=case.graphs)
    spec, exchange = _spec(case, config, args.batch_invariant), None
    if case.divided:
        exchange = TokenExchange(parallel_state.get_expert_tensor_and_model_parallel_group())
        spec = shard_layers(spec, exchange)
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=args.vocab_size,
        max_sequence_length=args.longest_prompt + args.longest_output,
        position_embedding_type="rope",
    )
    if exchange is not None:
        shard_vocabulary(model, exchange)
    model.to(processes.device, dtype)
    with torch.no_grad():
        _fill(model, args.seed)
    return model.eval()


def _fill(model: GPTModel, seed: int) -> None:
    """Set weights that keep activations near unit size, the same ones by name.

    Next to a layer's output an embedding is then small, so that the whole context decides.
    """
    import torch

    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            generator = torch.Generator(parameter.device)
            generator.manual_seed(seed + zlib.crc32(name.encode()))
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def _spec(case: Case, config, batch_invariant: bool):
    from absorbed_mla import AbsorbedMLAOptions
    from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec
    from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec

    backend = config.transformer_impl
    if case.implementation == "standard":
        return get_standard_mla_decoder_block_spec(config, backend=backend)
    options = AbsorbedMLAOptions(batch_invariant=batch_invariant)
    return get_absorbed_mla_decoder_block_spec(config, backend=backend, options=options)
