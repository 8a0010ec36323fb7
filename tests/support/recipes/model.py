"""The model that recipes train, in the parallel layout of the moment, and its first weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.checkpoint.distributed import load_model_weights, save_model_weights
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.oracle import OracleMLA
from tests.support import world
from tests.support.cases import config_for
from tests.support.recipes.recipe import Recipe

LAYERS, VOCAB, SEED = 4, 512, 7
# Widths that TransformerEngine and the kernels for GPUs accept, and small ones for a CPU.
_SHAPE = {"rope_type": "yarn", "rotary_base": 10000.0, "scaling_factor": 4.0}
_SHAPE |= {"original_context": 64, "mscale": 1.0, "mscale_all_dim": 1.0, "norm_eps": 1e-5}
_ON_GPU = {"hidden": 512, "heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128}
_ON_GPU |= {"nope": 64, "rope": 32, "v": 64}
_ON_CPU = {"hidden": 32, "heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24}
_ON_CPU |= {"nope": 12, "rope": 8, "v": 20}


def tokens_of_a_sequence() -> int:
    """Of one microbatch; TransformerEngine offloads tensors of 2^18 numbers and more."""
    return 512 if _on_gpu() else 16


def backend() -> str:
    """TransformerEngine's layers where they can run."""
    return "transformer_engine" if _on_gpu() and HAVE_TE else "local"


def dtype_of(recipe: Recipe) -> torch.dtype:
    """Of weights and computation."""
    return torch.bfloat16 if _on_gpu() or recipe.bf16 else torch.float32


def config_of(recipe: Recipe, **changes: Any) -> MLATransformerConfig:
    """Megatron's config for the sizes of the moment."""
    mla = OracleMLA(**{**_SHAPE, **(_ON_GPU if _on_gpu() else _ON_CPU)})
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    fields = {
        "num_layers": LAYERS,
        "tensor_model_parallel_size": world.tp_size(),
        "sequence_parallel": world.tp_size() > 1,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": virtual,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "pipeline_dtype": dtype_of(recipe),
        # Megatron's interleaved schedule over gloo hangs without it.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "transformer_impl": backend(),
        "use_cpu_initialization": not _on_gpu(),
        "activation_func": torch.nn.functional.silu,
        **(_experts(mla.hidden) if recipe.experts else {}),
    }
    return config_for(mla, dtype_of(recipe), **{**fields, **recipe.config, **changes})


def _experts(hidden: int) -> dict[str, object]:
    return {
        "num_moe_experts": 4,
        "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "moe_router_topk": 2,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": hidden // 2,
        "moe_shared_expert_intermediate_size": hidden // 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": backend() == "transformer_engine",
    }


def gpt_chunks(recipe: Recipe) -> list[nn.Module]:
    """This rank's GPTModels, one for each virtual stage, with the first weights."""
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    config = config_of(recipe)
    chunks = [_gpt(config, None if virtual is None else i) for i in range(virtual or 1)]
    return _with_first_weights(recipe, chunks)


def fused_chunks(recipe: Recipe) -> list[nn.Module]:
    """GPTModels whose TransformerEngine layers accumulate into ``main_grad`` themselves.

    Megatron's output layer is not TransformerEngine's and needs apex to do so; autograd
    accumulates its gradient.
    """
    with mock.patch.object(layers, "_grad_accum_fusion_available", True):
        chunks = gpt_chunks(recipe)
    own = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, own):
            module.gradient_accumulation_fusion = False
    return chunks


def _gpt(config: MLATransformerConfig, vp_stage: int | None) -> GPTModel:
    _seed()
    spec = get_absorbed_mla_decoder_block_spec(config, backend=backend(), vp_stage=vp_stage)
    place = {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=tokens_of_a_sequence(),
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        position_embedding_type="rope",
        vp_stage=vp_stage,
    ).to(world.device(), config.params_dtype)


def _seed() -> None:
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)


# By what the weights depend on: a folder for each model, and what each layout has read of it.
_folders: dict[tuple, Path] = {}
_read: dict[tuple, list[dict[str, Tensor]]] = {}


def _first_weights(recipe: Recipe) -> Path:
    """A checkpoint that :func:`write_first_weights` has written."""
    return _folders[recipe.experts, dtype_of(recipe)]


def write_first_weights(recipe: Recipe, parent: Path) -> None:
    """Write a model in one process as a distributed checkpoint, once. Collective."""
    key = recipe.experts, dtype_of(recipe)
    if key in _folders and _folders[key].exists():
        return
    folder = parent / "-".join(map(str, key))
    with world.parallel():
        model = _gpt(config_of(replace(recipe, config={})), None)
        folder.mkdir(exist_ok=True)
        torch.distributed.barrier()
        save_model_weights(model, folder)
    _folders[key] = folder


def _with_first_weights(recipe: Recipe, chunks: list[nn.Module]) -> list[nn.Module]:
    key = recipe.layout.name, recipe.experts, dtype_of(recipe)
    if key not in _read:
        # The checkpoint has layers of the other virtual stages, too.
        others = ("decoder.", "embedding.", "output_layer.") if len(chunks) > 1 else ()
        for chunk in chunks:
            load_model_weights(chunk, _first_weights(recipe), ignore=others)
        _read[key] = [{n: p.detach().clone() for n, p in c.named_parameters()} for c in chunks]
    with torch.no_grad():
        for chunk, state in zip(chunks, _read[key], strict=True):
            for name, parameter in chunk.named_parameters():
                parameter.copy_(state[name])
    return chunks


def _on_gpu() -> bool:
    return world.device().type == "cuda"
