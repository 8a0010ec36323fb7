"""CUDA graphs of the engine's steps: Megatron's options for them, and how to delete them.

Megatron captures and replays the graphs. Capturing needs ``graph_fields`` in the model's config,
``seed_generators`` before the model is built and ``EngineOptions.num_cuda_graphs``.
"""

from __future__ import annotations

from megatron.core import tensor_parallel
from megatron.core.transformer.cuda_graphs import delete_cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig

from absorbed_mla.serving.scheduler.full_cuda_graphs import clear_all

# Numbers of tokens that steps are padded to: Megatron's default.
NUM_CUDA_GRAPHS = 16


def graph_fields(scope: str | None) -> dict[str, object]:
    """Fields of Megatron's model config that decide what one graph holds.

    Args:
        scope: ``"layer"``, ``"block"`` (all layers), or None for no graphs.
    """
    return {
        "cuda_graph_impl": "none" if scope is None else "local",
        "inference_cuda_graph_scope": scope,
    }


def model_fields(pads_experts: bool) -> dict[str, object]:
    """Fields of Megatron's model config for one graph per layer.

    Args:
        pads_experts: Whether the model has MoE layers whose experts are not grouped
            (``absorbed_mla.serving.experts``).
    """
    # With room for every token of a step in every expert, no size depends on the routing.
    return {
        **graph_fields("layer"),
        "moe_pad_experts_for_cuda_graph_inference": pads_experts,
    }


def require_model_fields(config: TransformerConfig) -> None:
    """Check that a model was built with :func:`model_fields`.

    Raises:
        ValueError: If it was not.
    """
    if config.cuda_graph_impl != "local":
        raise ValueError(
            "cuda_graphs needs a model that was built for them, with the fields of "
            "absorbed_mla.serving.scheduler.cuda_graphs.model_fields in its config"
        )


def engine_fields(
    num_graphs: int | None, pads_experts: bool, *, whole_prefills: bool = False
) -> dict[str, object]:
    """Fields of Megatron's ``InferenceConfig``.

    Args:
        num_graphs: Numbers of tokens to capture steps for; None for no graphs.
        pads_experts: As in :func:`model_fields`.
        whole_prefills: Whether steps that read prompts have graphs of their own
            (``prefill_graphs.py``), and none of Megatron's.
    """
    if num_graphs is None:
        return {}
    # In a prefill, experts with room for every token would mostly compute padding.
    return {
        "num_cuda_graphs": num_graphs,
        "use_cuda_graphs_for_non_decode_steps": not (pads_experts or whole_prefills),
    }


def seed_generators(seed: int, *, graphs: bool) -> None:
    """Seed Megatron's random-number generators; to be called before the model is built.

    Megatron captures graphs with its inference tracker only, although nothing random is captured.
    """
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, inference_rng_tracker=graphs, force_reset_rng=True
    )


def delete_graphs() -> None:
    """Delete all CUDA graphs of the process, Megatron's and those of whole steps."""
    clear_all()
    delete_cuda_graphs()
