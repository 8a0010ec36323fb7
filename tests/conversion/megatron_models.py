"""Tiny Megatron models with either attention, for the configs of the conversion's tests."""

import argparse
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from torch import Tensor

from absorbed_mla.checkpoint.distributed import model_sharded_state_dict
from checkpoint_conversion.formats.legacy import as_mapped
from checkpoint_conversion.model import ModelConfig
from tests.support.cases import TINY, config_for
from tests.support.models import BLOCK_SPECS, MIXED, TOKENS, VOCAB
from tests.support.standard import KV_UP, interleave_heads

BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
# Fields of config.json that describe these models.
SAME = {
    "intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


def megatron_model(
    config: ModelConfig,
    kind: str = "standard",
    seed: int = 0,
    stage: tuple[bool, bool] = (True, True),
    vp_stage: int | None = None,
    **changes: object,
) -> GPTModel:
    """A model of local layers whose weights are all random, norms included.

    Args:
        config: Of ``tiny_config`` with the fields ``SAME``.
        kind: ``"standard"`` or ``"absorbed"``.
        seed: Decides the weights.
        stage: Whether it is the first, and whether the last stage of a pipeline.
        vp_stage: Which of this rank's chunks, in a virtual pipeline.
        changes: Fields of Megatron's config.
    """
    parts: dict = {"num_layers": config.num_layers}
    if any(config.moe_layers):
        # An int, with which Megatron stacks layers, if all are alike.
        pattern = 1 if all(config.moe_layers) else [int(moe) for moe in config.moe_layers]
        parts = {**MIXED, **BIAS, **parts, "moe_layer_freq": pattern}
    size = parallel_state.get_tensor_model_parallel_world_size()
    # Megatron's local MTP layers have norms that refuse sequence parallelism.
    sequence_parallel = size > 1 and not config.mtp_layers
    parts |= {"tensor_model_parallel_size": size, "sequence_parallel": sequence_parallel}
    parts |= {"mtp_num_layers": config.mtp_layers or None, **changes}
    fields = config_for(TINY, torch.float32, **parts)
    chunk = {} if vp_stage is None else {"vp_stage": vp_stage}
    spec = BLOCK_SPECS[kind](fields, backend="local", **chunk)
    mtp = None
    if config.mtp_layers and stage[1]:
        mtp = get_gpt_mtp_block_spec(fields, spec, use_transformer_engine=False)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    model = GPTModel(
        config=fields,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        share_embeddings_and_output_weights=config.tied_embeddings,
        pre_process=stage[0],
        post_process=stage[1],
        **chunk,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor is not None:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 5)
    return model


def mapped_weights(model: GPTModel) -> dict[str, Tensor]:
    """A model's own tensors under the names of the conversion's mapping."""
    return mapped_state(model.state_dict())


def mapped_state(model_state: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The tensors of a model's state dict likewise."""
    state = {k: v.detach().cpu() for k, v in model_state.items() if v is not None}
    for name in [name for name in state if name.endswith("linear_k_up_proj.weight")]:
        values = state.pop(name.replace("_k_", "_v_"))
        combined = interleave_heads(TINY, state.pop(name), values)
        state[name.replace("linear_k_up_proj.weight", KV_UP)] = combined
    return {as_mapped(name): tensor for name, tensor in state.items()}


def save_torch_dist(
    folder: Path,
    model: GPTModel,
    args: argparse.Namespace | None = None,
    *,
    stacked: bool = False,
    iteration: int = 10,
    **beside: object,
) -> None:
    """Save as Megatron's own save_checkpoint does, with what is ``beside`` the model."""
    inner = folder / f"iter_{iteration:07d}"
    inner.mkdir(parents=True, exist_ok=True)
    state = model_sharded_state_dict(model, non_homogeneous_layers=not stacked)
    content = {"model": state, "checkpoint_version": 3.0, "iteration": iteration, **beside}
    if args is not None:
        content["args"] = args
    dist_checkpointing.save(content, str(inner), TorchDistSaveShardedStrategy(thread_count=1))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def load_strictly(folder: Path, model: GPTModel, *, stacked: bool = False) -> None:
    """Load with Megatron alone, which has to find all it asks for and nothing else."""
    asked = {"model": model_sharded_state_dict(model, non_homogeneous_layers=not stacked)}
    loaded, missing, unexpected = dist_checkpointing.load(
        asked, str(folder), strict=dist_checkpointing.validation.StrictHandling.RETURN_ALL
    )
    assert not missing
    assert not unexpected
    model.load_state_dict(loaded["model"], strict=True)
