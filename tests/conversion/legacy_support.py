"""Per-rank checkpoints: written here with ``torch.save``, read by the package."""

import argparse
import re
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_conversion.checkpoint_folder import RANK_FILE
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from checkpoint_conversion.formats.legacy_ranks import Rank, Sizes
from checkpoint_conversion.formats.megatron_folder import inner_name, write_around
from checkpoint_conversion.layouts import (
    MegatronLayout,
    laid_out_tensors,
    padded_size,
    with_padding,
)
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model import ModelConfig
from tests.conversion.support import in_memory, load_all

_EXPERT = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.weight")
_DOWN = re.compile(r".*linear_(q|kv|qkv)_down_proj\.weight")
_COPIED = re.compile(r".*((layernorm|layer_norm|[eh]norm|router)[._]?\w*|\.indexer\..*)")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def shards(
    name: str, value: Tensor, config: ModelConfig, size: int, cut_down: bool = False
) -> list[Tensor]:
    """What each tensor-parallel rank has of a tensor, said without the package's own rules.

    With ``cut_down`` they share the down-projections, as in local layers.
    """
    down = _DOWN.fullmatch(name)
    if _COPIED.fullmatch(name) or (down and not cut_down):
        return [value] * size
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return list(value.chunk(size, dim=1))
    stacked = [value]
    if name.endswith("linear_fc1.weight"):
        stacked = list(value.chunk(2))
    elif down and down[1] == "qkv":
        stacked = list(value.split([config.q_lora_rank, len(value) - config.q_lora_rank]))
    return [torch.cat(own) for own in zip(*(weight.chunk(size) for weight in stacked))]


def of_stage(weights: dict[str, Tensor], config: ModelConfig, stage: int, stages: int) -> dict:
    """The tensors of a pipeline stage with equal numbers of layers, under their local names."""
    last, each = stage == stages - 1, config.num_layers // stages
    own = {}
    for name, value in weights.items():
        layer = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if layer and int(layer[1]) // each == stage:
            own[f"decoder.layers.{int(layer[1]) % each}.{layer[2]}"] = value
        elif not layer and (stage == 0 if name == EMBEDDING else last):
            own[name] = value
    # Copies of the embedding: for the MTP layers, and as a tied output layer.
    if last and stage and config.mtp_layers:
        own[EMBEDDING] = weights[EMBEDDING]
    if last and stage and config.tied_embeddings:
        own[OUTPUT] = weights[EMBEDDING]
    return own


def write_legacy(
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    *,
    norms: str = "fused",
    kv_up: str = "combined",
    down: str = "separate",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    cut_down: bool = False,
    vocab_multiple: int = 128,
    experts: str = "sequential",
    iteration: int | None = None,
) -> None:
    """Write a checkpoint of one file per rank, as Megatron would have saved it.

    Rows of the vocabulary are a multiple of ``vocab_multiple`` for each rank; experts have names of
    ``"sequential"`` or ``"grouped"`` modules. Without an iteration it is a release.
    """
    sizes = Sizes(tensor_parallel, pipeline_parallel)
    rows = padded_size(config.vocab_size, vocab_multiple * tensor_parallel)
    layout = MegatronLayout(norms=norms, kv_up=kv_up, down=down)
    padded = with_padding(to_megatron(in_memory(tensors), config), rows)
    whole = load_all(laid_out_tensors(padded, layout, config))
    args = to_megatron_args(config, dtype=next(iter(whole.values())).dtype, padded_vocab_size=rows)
    args.tensor_model_parallel_size = tensor_parallel
    args.pipeline_model_parallel_size = pipeline_parallel
    split = {
        name: shards(name, value, config, tensor_parallel, cut_down)
        for name, value in whole.items()
    }
    for stage in range(pipeline_parallel):
        own = of_stage(split, config, stage, pipeline_parallel)
        for rank in range(tensor_parallel):
            model: dict[str, Tensor | None] = {
                as_stored(name, experts): values[rank].clone() for name, values in own.items()
            }
            # Modules without an FP8 state save None.
            model |= {f"{name.rpartition('.')[0]}._extra_state": None for name in list(model)}
            content = {"args": args, "checkpoint_version": 3.0, "model": model}
            if iteration is not None:
                content["iteration"] = iteration
            place = inner_name(iteration), sizes.folder(Rank(rank, stage))
            save_rank(folder.joinpath(*place), content)
    write_around(folder, iteration, config, {})


def as_stored(name: str, experts: str) -> str:
    """The name in a state dict of megatron-core 0.19, of the mapping's as numbered on the rank."""
    if name.startswith("mtp."):
        name = name.replace(".transformer_layer.", ".mtp_model_layer.", 1)
    match = _EXPERT.fullmatch(name)
    if match is None or experts == "sequential":
        return name
    return f"{match[1]}{match[3]}.weight{match[2]}"


def read_legacy(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint under their Hugging Face names."""
    return load_all(LegacyCheckpoint(folder).hugging_face_tensors())


def load_rank(folder: Path, **how) -> dict:
    """What torch finds in the file in a rank's folder."""
    # Kept allowed: leaving torch's safe_globals() would take it from Megatron, too.
    torch.serialization.add_safe_globals([argparse.Namespace])
    return torch.load(folder / RANK_FILE, weights_only=True, **how)


def save_rank(folder: Path, content: object) -> None:
    """Save a rank's file with torch."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / RANK_FILE)


def change_rank(folder: Path, change) -> None:
    """Load a rank's file, change its content and save it."""
    content = load_rank(folder)
    change(content)
    save_rank(folder, content)


def only_args_config(folder: Path) -> None:
    """Remove config.json, so that the args must say what the model is."""
    for path in folder.glob("*/hugging_face/config.json"):
        path.unlink()
