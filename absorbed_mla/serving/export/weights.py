"""``hf_weights``: an iterator over a live model's weights under Hugging Face's names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from absorbed_mla.serving.export.agreement import on_all_ranks
from absorbed_mla.serving.export.iteration import started
from absorbed_mla.serving.export.live import (
    LiveCheckpoint,
    layer_options,
    model_chunks,
    model_config,
    model_shards,
    one_of_each,
)
from absorbed_mla.serving.export.shards import (
    ShardMetadata,
    describe,
    gathered_tensors,
    own_shards,
    sent_by_this_rank,
)
from absorbed_mla.serving.weights.update import Shapes
from checkpoint_conversion.checkpoint_folder import MAX_CONFIG_BYTES, read_json
from checkpoint_conversion.formats import writer_for
from checkpoint_conversion.formats.base import Part, TargetOptions
from checkpoint_conversion.fp8 import SCALE_FORMATS
from checkpoint_conversion.model import DTYPES, ModelConfig
from checkpoint_conversion.planning import plan_conversion


def hf_weights(
    model: nn.Module | Sequence[nn.Module],
    *,
    dtype: torch.dtype | None = None,
    fp8: bool | str = False,
    hf_config: Mapping[str, object] | Path | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The whole weights of a model that its ranks share, by Hugging Face name.

    The names, their order and every bit are those that ``absorbed-mla-convert --to hf`` writes from
    a saved checkpoint of the model: layer by layer, one tensor for each expert.

    Collective: every rank calls it with the same arguments and iterates to the end. Each gets every
    tensor whole, on the model's device, in memory of its own; beside its shards it holds one tensor
    at a time and the message it is made of. Weights must not change meanwhile. A rank that stops
    early serves the others until the next agreement (at most 64 MiB or one tensor later), and there
    they raise RuntimeError.

    Args:
        model: This rank's GPTModel, perhaps in DDP or Float16Module; or the list of its chunks.
        dtype: Of the weights; None keeps each tensor's own. The router's correction bias and
            the weights of an indexer's heads keep their own in any case.
        fp8: Linear layers of attention and MLPs in FP8, with one ``weight_scale_inv`` per block of
            128 x 128, as in DeepSeek-V3's checkpoints. True or ``"float"``: float32 scales;
            ``"ue8m0"``: powers of two.
        hf_config: The model's config.json, or its path. It says how many rows of a padded embedding
            are tokens, and which of several model types with the same tensors it is. None: what
            Megatron's config says, and no row is padding.

    Raises:
        ValueError: At the call: if the model has another attention, is none that the converter
            knows, or an option is wrong; if the ranks' process group has no backend for the model's
            device; if a program that reads the config.json would route, or scale queries, otherwise
            than the model. If ranks hold or ask for different things, or one of them raises it, all
            do.
        RuntimeError: While iterating, if another rank has stopped.
    """
    plan = export_plan(model, dtype, fp8, hf_config)
    return started(plan.parts, plan.device)


def hf_weight_shapes(
    model: nn.Module | Sequence[nn.Module],
    *,
    dtype: torch.dtype | None = None,
    fp8: bool | str = False,
    hf_config: Mapping[str, object] | Path | None = None,
) -> Shapes:
    """Name, dtype and shape of what :func:`hf_weights` gives for these arguments, in its order.

    For engines that ask for them before the first weight. Collective, but no weight is sent.
    """
    return export_plan(model, dtype, fp8, hf_config).shapes


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """What is exported, as the converter would write it.

    Attributes:
        parts: Their tensors read the model's weights.
        device: Of the model.
        shapes: Name, dtype and shape of each tensor.
    """

    parts: Sequence[Part]
    device: torch.device
    shapes: Shapes
    _weights: Sequence[tuple[Tensor, object]]

    def fits(self, model: nn.Module | Sequence[nn.Module]) -> bool:
        """Whether its tensors are the weights that the model has now."""
        now = [*weights_of(model_chunks(model))]
        return len(now) == len(self._weights) and all(
            one is weight and _place(one) == place
            for one, (weight, place) in zip(now, self._weights)
        )


def weights_of(chunks: Sequence[GPTModel]) -> Iterator[Tensor]:
    """Parameters and buffers."""
    for chunk in chunks:
        yield from itertools.chain(chunk.parameters(), chunk.buffers())


def _place(weight: Tensor) -> object:
    return weight.shape, weight.stride(), weight.dtype, weight.device


def export_plan(
    model: nn.Module | Sequence[nn.Module],
    dtype: torch.dtype | None = None,
    fp8: bool | str = False,
    hf_config: Mapping[str, object] | Path | None = None,
) -> ExportPlan:
    """Plan what :func:`hf_weights` gives; collective, with its errors."""

    def requested() -> tuple[tuple, set[tuple[str, object]]]:
        """The arguments, checked, and the options of this rank's layers."""
        chunks = model_chunks(model)
        _require_messages_on(next(chunks[0].parameters()).device)
        options = TargetOptions(dtype=_checked_dtype(dtype), fp8=_scale_format(fp8))
        fields = hf_config
        if isinstance(fields, Path):
            fields = read_json(fields, MAX_CONFIG_BYTES)
        return (chunks, options, fields), layer_options(chunks)

    (chunks, options, fields), found = on_all_ranks(requested)
    layers = one_of_each(found)
    (config, shards), described = on_all_ranks(lambda: _described(chunks, options, fields, layers))
    _require_same(described)
    device = next(chunks[0].parameters()).device
    weights = [*weights_of(chunks)]
    held = own_shards(shards, weights)
    tensors = gathered_tensors([own for _, own in described], held, device)
    parts = plan_conversion(LiveCheckpoint(tensors, config), "hf", options).parts
    entries = [entry for part in parts for entry in part.entries]
    return ExportPlan(
        parts,
        device,
        [(entry.key, entry.tensor.dtype, entry.tensor.shape) for entry in entries],
        [(one, _place(one)) for one in weights],
    )


def _described(
    chunks: Sequence[GPTModel],
    options: TargetOptions,
    hf_config: Mapping[str, object] | None,
    layers: Mapping[str, object],
) -> tuple[tuple[ModelConfig, list[ShardedTensor]], tuple[str, list[ShardMetadata]]]:
    """The model and this rank's shards of it; what all ranks must ask for, and these shards."""
    config = model_config(chunks[0], hf_config, layers)
    writer_for("hf", config, options)
    shards = [shard for shard in model_shards(chunks) if sent_by_this_rank(shard)]
    asked = f"{dataclasses.replace(config, hugging_face={})} with {options}"
    return (config, shards), (asked, [describe(shard) for shard in shards])


def _require_messages_on(device: torch.device) -> None:
    """Refuse a model on a device whose tensors its ranks cannot send to each other."""
    group = dist.group.WORLD
    assert group is not None
    kinds = {kind.type for kind in group._device_types}
    if group.size() > 1 and device.type not in kinds:
        raise ValueError(
            f"hf_weights sends tensors on the model's device; the model is on {device.type!r}, and "
            f"the process group has a backend for {', '.join(sorted(kinds))}: move the model, or "
            "use init_process_group('cpu:gloo,cuda:nccl')"
        )


def _checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype must be None or one of {', '.join(DTYPES)}; got {dtype}")
    return dtype


def _scale_format(fp8: bool | str) -> str | None:
    if isinstance(fp8, bool):
        return SCALE_FORMATS[0] if fp8 else None
    if fp8 not in SCALE_FORMATS:
        accepted = ", ".join(map(repr, SCALE_FORMATS))
        raise ValueError(f"fp8 must be False, True or one of {accepted}; got {fp8!r}")
    return fp8


def _require_same(described: Sequence[tuple[str, list[ShardMetadata]]]) -> None:
    """Refuse ranks that do not ask for the same."""
    first, _ = described[0]
    for rank, (asked, _) in enumerate(described):
        if asked != first:
            raise ValueError(
                f"all ranks must export one model with the same options; rank {rank} has {asked}, "
                f"rank 0 has {first}"
            )
