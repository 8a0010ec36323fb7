"""Per-rank checkpoints: written here with ``torch.save``, read by the package."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_conversion.checkpoint_folder import RANK_FILE
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from checkpoint_conversion.formats.legacy_ranks import Sizes, stages_of
from checkpoint_conversion.formats.legacy_sharding import Sharding
from checkpoint_conversion.formats.megatron_folder import inner_name, write_around
from checkpoint_conversion.layouts import MegatronLayout, laid_out_tensors
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model_config import ModelConfig
from checkpoint_conversion.vocabulary import padded_size, with_padding
from tests.conversion.support import in_memory, load_all

_EXPERT = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.weight")


def sharding_of(
    config: ModelConfig,
    *,
    norms: str = "fused",
    kv_up: str = "combined",
    down: str = "separate",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    down_projection: str | None = None,
    vocab_multiple: int = 128,
) -> Sharding:
    """How Megatron distributes a model over ranks, with equal pipeline stages."""
    layers = config.num_layers // pipeline_parallel
    by_norms = "duplicated" if norms == "fused" else "column-parallel"
    return Sharding(
        config=config,
        layout=MegatronLayout(norms=norms, kv_up=kv_up, down=down),
        sizes=Sizes(tensor_parallel, pipeline_parallel),
        stages=stages_of([layers] * pipeline_parallel),
        mtp_stage=pipeline_parallel - 1,
        down_projection=down_projection or by_norms,
        vocab_rows=padded_size(config.vocab_size, vocab_multiple * tensor_parallel),
    )


def write_legacy(
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, Tensor] | dict[str, LazyTensor],
    *,
    experts: str = "sequential",
    iteration: int | None = None,
    **options,
) -> Sharding:
    """Write a checkpoint of one file per rank, as Megatron would have saved it.

    Args:
        folder: The folder of all iterations.
        config: The model's dimensions.
        tensors: Its weights under their Hugging Face names.
        experts: ``"sequential"`` or ``"grouped"``: whose names the experts have.
        iteration: None for a release.
        options: Of :func:`sharding_of`.
    """
    sharding = sharding_of(config, **options)
    lazy = {k: v for k, v in tensors.items() if isinstance(v, LazyTensor)}
    lazy |= in_memory({k: v for k, v in tensors.items() if isinstance(v, Tensor)})
    padded = with_padding(to_megatron(lazy, config), sharding.vocab_rows)
    whole = laid_out_tensors(padded, sharding.layout, config)
    sizes = sharding.sizes
    for rank in sizes.ranks():
        model: dict[str, Tensor | None] = {}
        for name, share in sharding.shares(rank.pipeline).items():
            shares = sharding.rule(share.whole).shard(whole[share.whole], sizes.tensor)
            with ReadSession() as session:
                model[as_stored(name, experts)] = shares[rank.tensor].load(session).clone()
        # Modules without an FP8 state save None.
        model |= {f"{name.rpartition('.')[0]}._extra_state": None for name in list(model)}
        content = {"args": _args(sharding, model), "checkpoint_version": 3.0, "model": model}
        if iteration is not None:
            content["iteration"] = iteration
        save_rank(folder / inner_name(iteration) / sizes.folder(rank), content)
    write_around(folder, iteration, config, {})
    return sharding


def _args(sharding: Sharding, model: dict[str, Tensor | None]) -> argparse.Namespace:
    dtype = next(value.dtype for value in model.values() if value is not None)
    args = to_megatron_args(sharding.config, dtype=dtype, padded_vocab_size=sharding.vocab_rows)
    args.tensor_model_parallel_size = sharding.sizes.tensor
    args.pipeline_model_parallel_size = sharding.sizes.pipeline
    return args


def as_stored(name: str, experts: str) -> str:
    """The name in a state dict of megatron-core 0.19.

    Args:
        name: The mapping's, numbered as on the rank.
        experts: ``"sequential"`` or ``"grouped"``.
    """
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
