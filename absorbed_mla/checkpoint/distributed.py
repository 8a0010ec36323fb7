"""Weights of a whole model to and from Megatron's distributed checkpoints.

Standard and absorbed models write the same tensors. Only the names of norms differ between
backends: a norm is a module of its own in local layers and part of a linear layer in
TransformerEngine's. A GPTModel and a HybridModel number their layers differently
(``hybrid_names.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import nn

from absorbed_mla.checkpoint.hybrid_names import (
    names_in,
    require_alternating,
    to_gpt_name,
    to_hybrid_name,
)
from absorbed_mla.checkpoint.layout import Layout
from absorbed_mla.checkpoint.names import ATTENTION, EXTRA_STATE, INPUT_NORM
from absorbed_mla.registry import CHECKPOINT_LAYOUTS
from absorbed_mla.unsupported import refuse_tied_embeddings_beside_mtp

_OUTPUT_STATE = "output_layer" + EXTRA_STATE


def load_model_weights(
    model: nn.Module,
    checkpoint_dir: str | Path,
    *,
    ignore: tuple[str, ...] = (),
    initial: tuple[str, ...] = (),
) -> None:
    """Load a model's weights from a distributed checkpoint of a standard or absorbed MLA model.

    Collective over all ranks. The checkpoint may come from another tensor- or pipeline-parallel
    size, from local or TransformerEngine layers, and from a GPTModel or a HybridModel.

    Args:
        model: A Megatron model (or part of one, under the same names), not wrapped for DDP.
        checkpoint_dir: Folder that ``dist_checkpointing.save`` wrote. Optimizer states in it are
            not read.
        ignore: Prefixes of tensors in the checkpoint that the model need not have, e.g. ``"mtp."``.
        initial: Parts of the names of tensors that stay as they are in the model, and that the
            checkpoint must not have: ``".indexer."`` for a dense model that becomes sparse.

    Raises:
        ValueError: If the folder is no distributed checkpoint, or weights are missing, of other
            shapes or without a place in the model; all of them are listed.
    """
    checkpoint_dir = str(checkpoint_dir)
    if not dist_checkpointing.check_is_distributed_checkpoint(checkpoint_dir):
        raise ValueError(f"{checkpoint_dir} is not a distributed checkpoint (no metadata.json)")
    saved = dist_checkpointing.load_tensors_metadata(checkpoint_dir)
    shapes = {key: tuple(tensor.global_shape) for key, tensor in saved.items()}
    numbered = any(re.search(r"decoder\.layers\.\d+\.", key) for key in shapes)
    requested = _named_entries(model, names_in(shapes), numbered=numbered)
    # Extra states hold nothing outside FP8; the layers that keep one differ between backends.
    requested = {k: v for k, v in requested.items() if not isinstance(v, ShardedObject)}
    kept = {key for key in requested if any(part in key for part in initial)}
    requested = {key: entry for key, entry in requested.items() if key not in kept}
    for entry in nested_values(requested):
        entry.key = _name_in(shapes, entry.key)
    _check_complete(requested, shapes, checkpoint_dir, ignore)
    loaded = dist_checkpointing.load(requested, checkpoint_dir)
    # A training checkpoint's common state (arguments, iteration) comes along.
    weights = {key: loaded[key] for key in requested}
    own = model.state_dict()
    left = {key: own[key] for key in kept}
    model.load_state_dict({**_extra_states(model), **left, **weights})


def model_sharded_state_dict(
    model: Any, *, non_homogeneous_layers: bool = True
) -> ShardedStateDict:
    """``model.sharded_state_dict()`` with the metadata that Megatron 0.19 expects.

    Args:
        model: A Megatron model.
        non_homogeneous_layers: Whether layers are saved under their numbers instead of stacked;
            models with dense and MoE layers always are.

    Raises:
        ValueError: On all stages of a pipeline, if the last one has MTP and a tied output layer.
    """
    if hasattr(model, "share_embeddings_and_output_weights"):
        refuse_tied_embeddings_beside_mtp(model.config, model.share_embeddings_and_output_weights)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "non_homogeneous_layers": non_homogeneous_layers}
    return model.sharded_state_dict(metadata=metadata)


def save_model_weights(
    model: nn.Module,
    checkpoint_dir: str | Path,
    *,
    norm_names: str | None = None,
    layer_names: str | None = None,
) -> None:
    """Write a model's weights as a distributed checkpoint that standard MLA models can load.

    Args:
        model: A Megatron model, not wrapped for DDP.
        checkpoint_dir: An existing empty folder.
        norm_names: ``"local"`` or ``"transformer_engine"``: the layers of the model that is to load
            it; None writes the names of this model's own backend.
        layer_names: ``"gpt"`` or ``"hybrid"``: the model that is to load it, a GPTModel or a
            HybridModel of alternating layers; None writes this model's own names.

    Raises:
        ValueError: If ``norm_names`` or ``layer_names`` is unknown, or the HybridModel is no
            GPTModel under other names.
    """
    backends = {one.backend: one for one in CHECKPOINT_LAYOUTS if one.backend is not None}
    if norm_names not in (None, "local", *backends):
        accepted = " or ".join(map(repr, ("local", *backends)))
        raise ValueError(f"norm_names must be None, {accepted}; got {norm_names!r}")
    if layer_names not in (None, "gpt", "hybrid"):
        raise ValueError(f"layer_names must be None, 'gpt' or 'hybrid'; got {layer_names!r}")
    entries = _named_entries(model, layer_names, numbered=True)
    if norm_names is not None:
        for entry in nested_values(entries):
            if isinstance(entry, ShardedBase):
                entry.key = _renamed(entry.key, backends.get(norm_names))
    dist_checkpointing.save(entries, str(checkpoint_dir))


def _named_entries(model: Any, names: str | None, *, numbered: bool) -> ShardedStateDict:
    """``model.sharded_state_dict()`` under the names of a GPTModel or a HybridModel.

    Args:
        model: Either of them, or another model, which has its own names.
        names: ``"gpt"`` or ``"hybrid"``; None leaves the model's own.
        numbered: Whether a GPTModel's layers are under their numbers instead of stacked.
    """
    own = "hybrid" if hasattr(model, "hybrid_layer_pattern") else "gpt"
    entries = model_sharded_state_dict(model, non_homogeneous_layers=numbered or names == "hybrid")
    if names in (None, own):
        return entries
    if own == "hybrid":
        require_alternating(model.hybrid_layer_pattern)
        if not numbered:
            entries.update(_stacked_layers(model))
    rename = to_gpt_name if own == "hybrid" else to_hybrid_name
    for entry in nested_values(entries):
        entry.key = rename(entry.key)
    # The only thing that a GPTModel does not write: an empty state of its output layer.
    entries.pop(_OUTPUT_STATE, None)
    if names == "hybrid" and "output_layer.weight" in entries:
        entries[_OUTPUT_STATE] = make_sharded_object_for_checkpoint(None, _OUTPUT_STATE)
    return entries


def _stacked_layers(model: Any) -> ShardedStateDict:
    """Entries of a HybridModel's decoder layers, with the layers as an axis of each tensor."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    count = model.config.num_layers // 2
    entries: ShardedStateDict = {}
    for i, layer in enumerate(model.decoder.layers):
        prefix = f"decoder.layers.{i}."
        offset = (0, (layer.layer_number - 1) // 2, count)
        own = layer.sharded_state_dict(prefix, [offset], {"dp_cp_group": group})
        replace_prefix_for_sharding(own, prefix, "decoder.layers.")
        entries.update(own)
    return entries


def _extra_states(model: nn.Module) -> dict[str, None]:
    return {key: None for key in model.state_dict() if key.endswith("_extra_state")}


def _renamed(key: str, layout: Layout | None) -> str:
    """The name that a tensor has in the layers of a layout's backend; None: in local layers."""
    for one in CHECKPOINT_LAYOUTS:
        for default, name in _norm_names(one).items():
            if key.endswith(name):
                key = key.removesuffix(name) + default
    for default, name in _norm_names(layout).items():
        if key.endswith(default):
            key = key.removesuffix(default) + name
    return key


def _norm_names(layout: Layout | None) -> dict[str, str]:
    """Ends of keys: in local layers -> in the layers of a layout's backend."""
    if layout is None or layout.backend is None:
        return {}
    return {
        rename.default.removeprefix(ATTENTION): rename.name.removeprefix(ATTENTION)
        for rename in layout.renames
        # Fused only with fused down-projections, which no distributed checkpoint of MLA has.
        if rename.default != INPUT_NORM
    }


def _name_in(saved: dict[str, tuple], key: str) -> str:
    """The name under which ``key``'s tensor is saved; ``key`` itself where it is not."""
    layouts = (None, *(one for one in CHECKPOINT_LAYOUTS if one.backend is not None))
    candidates = (key, *(_renamed(key, layout) for layout in layouts))
    return next((candidate for candidate in candidates if candidate in saved), key)


def _check_complete(
    requested: ShardedStateDict, saved: dict[str, tuple], where: str, ignore: tuple[str, ...]
) -> None:
    # Pipeline stages hold different layers. All ranks judge the whole model, so that all of them
    # raise together, and know what has no place in it.
    own = {tensor.key: tuple(tensor.global_shape) for tensor in sharded_tensors(requested)}
    stages: list[dict[str, tuple]] = [{}] * dist.get_world_size()
    dist.all_gather_object(stages, own)
    needed = {key: shape for stage in stages for key, shape in stage.items()}
    problems = []
    for key, shape in needed.items():
        if key not in saved:
            problems.append(f"{key} is missing, this model needs {shape}")
        elif saved[key] != shape:
            problems.append(f"{key} has shape {saved[key]}, this model needs {shape}")
    left_alone = ("optimizer.", "chained_", *ignore)
    problems += [
        f"{key} of shape {shape} has no place in this model"
        for key, shape in saved.items()
        if key not in needed and not key.startswith(left_alone)
    ]
    if problems:
        raise ValueError(f"{where} does not fit the model: " + "; ".join(sorted(problems)))


def sharded_tensors(entries: ShardedStateDict) -> Iterator[ShardedTensor]:
    """Every tensor that a checkpoint would hold, of which a factory makes several."""
    for entry in nested_values(entries):
        made = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        yield from (one for one in made if isinstance(one, ShardedTensor))
