"""Benchmarks whose models generate, also on a CPU: models of random weights, and the clock."""

from __future__ import annotations

import time
import warnings
import zlib
from typing import TYPE_CHECKING, Any

from benchmarks.kit.lazy import lazy
from benchmarks.kit.run import Benchmark

if TYPE_CHECKING:
    import argparse

    from megatron.core.models.gpt import GPTModel

    from benchmarks.kit.processes import Processes

torch: Any = lazy("torch")


class GeneratingBenchmark(Benchmark):
    """Ready to build models, on one device or in torchrun's processes."""

    strict = True

    def prepare(self) -> None:
        """The processes; a CPU takes the place of a GPU in Megatron's engine."""
        warnings.filterwarnings("ignore")
        from absorbed_mla.serving.cpu_engine import enable_cpu_inference

        enable_cpu_inference()
        super().prepare()

    def clock(self) -> float:
        """Seconds, after everything that the device was given."""
        self.processes.synchronize()
        return time.perf_counter()

    def model(self, length: int, **more: Any) -> GPTModel:
        """See :func:`build`."""
        return build(self.args, self.processes, length, **more)


def build(
    args: argparse.Namespace,
    processes: Processes,
    length: int,
    *,
    dtype: torch.dtype | None = None,
    standard: bool = False,
    graphs: bool = False,
    divided: bool = False,
    batch_invariant: bool = False,
) -> GPTModel:
    """A model with random weights, the same ones by name, in evaluation mode.

    Args:
        args: Sizes of the model.
        processes: For the device.
        length: Tokens of the longest sequence.
        dtype: Of the weights; None for that of the device.
        standard: Whether attention is Megatron's MLASelfAttention, not ours.
        graphs: Whether steps are replayed from CUDA graphs.
        divided: Whether attention is whole on every rank and the rest divided over Megatron's ranks
            of experts.
        batch_invariant: Whether our attention is in parity mode.

    Raises:
        ValueError: If it cannot be built here.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
    from absorbed_mla.serving.data_parallel_attention.model import shard_layers, shard_vocabulary
    from absorbed_mla.serving.scheduler.cuda_graphs import graph_fields, seed_generators

    dtype = dtype or processes.dtype
    config = config_of(
        args,
        processes,
        dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        # A CPU has no CUDA graphs.
        **graph_fields("layer" if graphs and processes.on_gpu else None),
    )
    seed_generators(args.seed, graphs=graphs)
    spec, exchange = _spec(config, standard, batch_invariant), None
    if divided:
        exchange = TokenExchange(parallel_state.get_expert_tensor_and_model_parallel_group())
        spec = shard_layers(spec, exchange)
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=args.vocab_size,
        max_sequence_length=length,
        position_embedding_type="rope",
    )
    if exchange is not None:
        shard_vocabulary(model, exchange)
    model.to(processes.device, dtype)
    with torch.no_grad():
        _fill(model, args.seed)
    return model.eval()


def config_of(
    args: argparse.Namespace, processes: Processes, dtype: torch.dtype, **more: Any
) -> Any:
    """Megatron's config of a model that keeps latents in its cache."""
    from benchmarks.kit.layers import mla_config

    return mla_config(
        args,
        processes,
        dtype,
        num_layers=args.num_layers,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.heads,
        rotary_scaling_factor=1.0,
        mscale_all_dim=0.0,
        cache_mla_latents=True,
        gated_linear_unit=True,
        bias_activation_fusion=False,
        **more,
    )


def _fill(model: GPTModel, seed: int) -> None:
    """Set weights that keep activations near unit size, the same ones by name.

    Next to a layer's output an embedding is then small, so that the whole context decides.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            generator = torch.Generator(parameter.device)
            generator.manual_seed(seed + zlib.crc32(name.encode()))
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def _spec(config: Any, standard: bool, batch_invariant: bool) -> Any:
    from absorbed_mla import AbsorbedMLAOptions
    from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec
    from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec

    backend = config.transformer_impl
    if standard:
        return get_standard_mla_decoder_block_spec(config, backend=backend)
    options = AbsorbedMLAOptions(batch_invariant=batch_invariant)
    return get_absorbed_mla_decoder_block_spec(config, backend=backend, options=options)
