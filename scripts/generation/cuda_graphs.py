"""Megatron's own CUDA graphs of its engine's steps: what they need, and what cannot be captured."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.cuda_graphs import delete_cuda_graphs
from megatron.core.transformer.transformer_config import MLATransformerConfig

from training.model_options import token_dispatcher
from training.presets import ModelPreset

# Numbers of tokens that steps are padded to, Megatron's default; fewer where steps are small.
_NUM_GRAPHS = 16


def graph_fields(scope: str | None) -> dict[str, object]:
    """Of Megatron's config: what a graph holds, ``"layer"`` or ``"block"``; None for no graphs."""
    return {
        "cuda_graph_impl": "none" if scope is None else "local",
        "inference_cuda_graph_scope": scope,
    }


def seed_generators(seed: int, *, graphs: bool) -> None:
    """Seed Megatron's generators, before the model is built."""
    # Megatron captures graphs with this random-number tracker only; nothing is drawn in them.
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, inference_rng_tracker=graphs, force_reset_rng=True
    )


@contextlib.contextmanager
def forgetting_graphs(captured: bool) -> Iterator[None]:
    """Delete the graphs, if any are captured meanwhile, and give their memory back.

    NCCL cannot leave a group while a graph holds one of its exchanges (pytorch/pytorch#115388).
    """
    try:
        yield
    finally:
        if captured:
            delete_cuda_graphs()


def check_graphs(args: argparse.Namespace, model: ModelPreset) -> None:
    """Refuse ``--cuda-graphs`` where no graph can be captured.

    Tensor and sequence parallelism are Megatron's to capture: it cuts the sizes of graphs to what
    the ranks divide, and makes the buffer of gathered tokens as large as it gets before it begins.

    Raises:
        ValueError: Naming the option that does not go with it, and what does.
    """
    if not args.cuda_graphs:
        return
    if not torch.cuda.is_available():
        raise ValueError("--cuda-graphs needs a GPU, and there is none here; leave it out")
    if args.form == "expanded":
        raise ValueError(
            "--cuda-graphs needs --form auto or absorbed, got expanded, whose work depends on the "
            "lengths of a step"
        )
    dispatcher = token_dispatcher(args, "cuda")
    if model.num_moe_experts and dispatcher != "alltoall":
        raise ValueError(
            "--cuda-graphs of a model with experts needs --moe-token-dispatcher-type alltoall, got "
            f"{dispatcher}, which reads on the host how many tokens each expert has"
        )


def model_fields(args: argparse.Namespace, model: ModelPreset) -> dict[str, object]:
    """Of Megatron's config, for ``--cuda-graphs``; nothing without it."""
    if not args.cuda_graphs:
        return {}
    # Every expert gets room for every token of a captured step: no size depends on the routing.
    padded = {"moe_pad_experts_for_cuda_graph_inference": bool(model.num_moe_experts)}
    return {**graph_fields("layer"), **padded}


def engine_fields(args: argparse.Namespace, config: MLATransformerConfig) -> dict[str, object]:
    """Of Megatron's ``InferenceConfig``, for ``--cuda-graphs``; nothing without it."""
    if not args.cuda_graphs:
        return {}
    # Room for every token costs little while there are few; a prefill would compute most of it
    # for nothing.
    return {
        "num_cuda_graphs": _NUM_GRAPHS,
        "use_cuda_graphs_for_non_decode_steps": not config.num_moe_experts,
    }
