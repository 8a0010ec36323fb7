"""Reader of ``megatron`` and ``absorbed``: Megatron's distributed checkpoints (torch_dist).

torch's ``FileSystemReader`` is not used: it unpickles ``.metadata`` unchecked, copies whole chunks
into memory where a conversion needs some rows, and accepts compressed records of any size.

Megatron-Core 0.19 stores the common state (arguments, iteration) as an object of the checkpoint,
earlier releases in a file of its own, ``common.pt``. Both are read, the file first.

One tensor may hold all layers or all experts:

    decoder.layers.N.<rest>                           numbered layers, or
    decoder.layers.<rest>                             stacked layers: the first dim
    <layer>mlp.experts.experts.linear_fc1.weight      stacked experts: the next dim, or
    <layer>mlp.experts.experts.E.linear_fc1.weight    one tensor per expert
    <name>.weight_w, <name>.weight_v                  the two halves of linear_fc1

The mapping to Hugging Face has numbered layers, ``mlp.experts.local_experts.E.`` and whole tensors.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absorbed_mla.checkpoint.names import KV_UP
from checkpoint_conversion.checkpoint_folder import CONFIG, METADATA, file_inside, read_json
from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.formats.megatron_folder import MegatronCheckpoint
from checkpoint_conversion.formats.pt_file import open_pt
from checkpoint_conversion.formats.torch_dist_metadata import (
    ChunkedTensor,
    Shape,
    Storage,
    TiledTensor,
)
from checkpoint_conversion.layouts import VOCABULARY, MegatronLayout
from checkpoint_conversion.lazy_tensor import LazyTensor, concat
from checkpoint_conversion.model import ModelConfig

COMMON_STATE = "common_state/shard_0_1"
COMMON_FILE = "common.pt"
BACKEND_FILE = "metadata.json"
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
# A module's state without FP8 has up to 1513 bytes, nearly all of them torch.save's own.
_EMPTY_STATE = 2048
EXTRA_STATE = "._extra_state"
# Prefixes of training state.
_LEFT_ALONE = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")
_LAYER, _EXPERT = "<layer>", "<expert>"
_NUMBERED_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)experts\.((?:\d+\.)?)(linear_fc[12]\..+)")
_NUMBERED_EXPERT = re.compile(r"(.+\.mlp\.experts\.)local_experts\.(\d+)\.(.+)")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
_HALVES = ("_w", "_v")
# Modules that save an _extra_state: linear layers; in TransformerEngine also norms.
_LINEAR = re.compile(r"(?:.+\.)?(?:linear_\w+|eh_proj)")
_NORM = re.compile(r"(?:.+\.)?(?:\w*layernorm|enorm|hnorm|k_norm)")


class TorchDistCheckpoint(MegatronCheckpoint):
    """A distributed checkpoint of a standard or an absorbed model.

    Raises:
        CheckpointError: If it cannot be read, contradicts itself, or nothing describes the model.
    """

    def __init__(self, path: Path, **how: Any) -> None:
        super().__init__(path, **how)
        # The folder of the iteration may be a link, too.
        self.source.file(self.folder / METADATA)
        check_backend(self.folder, self.source.follow_links)
        storage = Storage(self.folder, self.source.follow_links)
        self._weights = storage.read([n for n in storage.tensors if not is_left_alone(n)])
        self.stored = {name: tensor.lazy() for name, tensor in self._weights.items()}
        common, states = self._read_common(storage), states_in_use(storage)
        both = [self.stored[name].shape[:1] for name in VOCABULARY if name in self.stored]
        rows = max(sum(both, ()), default=0)
        self.describe_model(arguments(common), count_mtp_layers(self._weights), rows, states)
        self.left_alone = self._left_alone(storage, states)
        absorbed = has_absorbed_blocks(self._weights, self.config)
        self.format = "absorbed" if absorbed else "megatron"
        stacked = any(map(_STACKED_LAYERS.fullmatch, self._weights))
        layout = MegatronLayout.recognise(map(_pattern, self._weights))
        number = common.get("iteration")
        iteration = number if type(number) is int and number > 0 else None
        self.layout = describe(layout, stacked, iteration)

    def whole_tensors(self) -> dict[str, LazyTensor]:
        """Split what is stacked; see the base class."""
        return numbered_tensors(self._weights, self.config)

    def _read_common(self, storage: Storage) -> Mapping[str, object]:
        try:
            return read_common_state(self.folder, storage, self.source.follow_links)
        except CheckpointError as error:
            # It is not needed where a config.json describes the model.
            if self.source.hf_config is None and CONFIG not in self.auxiliary:
                raise
            self.notes.append(f"the arguments of the training are not read: {error}")
            return {}

    def _left_alone(self, storage: Storage, states: Mapping[str, int]) -> dict[str, int]:
        left = {name for name in storage.tensors if is_left_alone(name)} | states.keys()
        for name in storage.objects:
            if is_extra_state(name) or name == COMMON_STATE:
                continue
            left.add(name)
            if not is_left_alone(name):
                self.notes.append(f"{name} is an object of an unknown kind, which is left alone")
        everything = (*storage.tensors, *storage.objects)
        return {name: storage.nbytes(name) for name in everything if name in left}


def count_mtp_layers(names: Iterable[str]) -> int:
    """Number of multi-token-prediction layers among a model's tensors."""
    return len({match[1] for match in map(_MTP_LAYER.match, names) if match})


def has_absorbed_blocks(weights: Mapping[str, ChunkedTensor], config: ModelConfig) -> bool:
    """Whether K/V up-projections are stored in blocks of rows, as an absorbed model does.

    A standard model stores the rows of whole heads.
    """
    block = block_rows(config)
    tensors = [tensor for name, tensor in weights.items() if name.endswith(KV_UP)]
    return bool(tensors) and all(
        len(tensor.shape) >= 2 and tensor.chunk_size(min(tensor.chunks))[-2] == block
        for tensor in tensors
    )


def block_rows(config: ModelConfig) -> int:
    """Rows per block: the largest size that divides both the K and the V rows of a head."""
    return math.gcd(config.qk_nope_head_dim, config.v_head_dim)


def describe(layout: MegatronLayout, stacked: bool, iteration: int | None) -> dict[str, object]:
    """The entries of :attr:`Checkpoint.layout`; a release has no iteration."""
    result = layout.describe() | {"layers": "stacked" if stacked else "numbered"}
    return result if iteration is None else result | {"iteration": iteration}


def check_backend(folder: Path, follow_links: bool) -> None:
    """Check that ``folder`` holds a finished checkpoint that Megatron wrote in this format.

    Raises:
        CheckpointError: If it does not.
    """
    if not (folder / BACKEND_FILE).exists():
        raise CheckpointError(
            f"{folder} has no {BACKEND_FILE}: it is a checkpoint of torch.distributed.checkpoint, "
            "but not one that Megatron has finished"
        )
    found = read_json(file_inside(folder, BACKEND_FILE, follow_links=follow_links))
    if any(found.get(key) != value for key, value in BACKEND.items()):
        raise CheckpointError(
            f"{folder / BACKEND_FILE} says {str(found)[:200]}; only "
            f"{BACKEND['sharded_backend']} of version {BACKEND['sharded_backend_version']} is known"
        )


def read_common_state(
    folder: Path, storage: Storage, follow_links: bool = False
) -> Mapping[str, object]:
    """The common state: ``args``, ``iteration`` and more; empty if there is none.

    Raises:
        CheckpointError: If it cannot be read.
    """
    if (folder / COMMON_FILE).exists():
        content = open_pt(file_inside(folder, COMMON_FILE, follow_links=follow_links)).content
    elif COMMON_STATE in storage.objects:
        content = open_pt(storage.object(COMMON_STATE)).content
        # A list with one entry per shard of the object.
        content = content[0] if isinstance(content, list) and len(content) == 1 else None
    else:
        return {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder}: the common state is no dict")
    return content


def arguments(common: Mapping[str, object]) -> Mapping[str, object]:
    """The arguments of the training that saved a checkpoint; empty if it holds none."""
    args = common.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def states_in_use(storage: Storage) -> dict[str, int]:
    """Modules' states that are not empty: name -> size in bytes."""
    states = {name: storage.nbytes(name) for name in storage.objects if is_extra_state(name)}
    return {name: nbytes for name, nbytes in states.items() if nbytes > _EMPTY_STATE}


def is_extra_state(name: str) -> bool:
    """Whether an object is the state of a module."""
    return f"{EXTRA_STATE}/shard_" in name


def is_left_alone(name: str) -> bool:
    """Whether a tensor or object is training state."""
    return name.startswith(_LEFT_ALONE)


def numbered_tensors(
    stored: Mapping[str, TiledTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """Tensors of single layers and experts, in a layout of :mod:`checkpoint_conversion.layouts`.

    Unknown names are kept, and refused by the mapping.

    Raises:
        CheckpointError: Listing tensors for other numbers of layers or experts, and duplicates.
    """
    counts = {_LAYER: config.num_layers, _EXPERT: config.num_experts}
    problems: list[str] = []
    result: dict[str, LazyTensor] = {}
    for stored_name, tensor in stored.items():
        pattern = _pattern(stored_name)
        dims = [dim for dim in (_LAYER, _EXPERT) if dim in pattern]
        expected = tuple(counts[dim] for dim in dims)
        if tensor.shape[: len(dims)] != expected:
            what = " and ".join(dim.strip("<>") + "s" for dim in dims)
            problems.append(
                f"{stored_name} has shape {tensor.shape}; for the model's {what} it would begin "
                f"with {expected}"
            )
            continue
        for index in itertools.product(*map(range, expected)):
            name = pattern
            for dim, number in zip(dims, index):
                name = name.replace(dim, str(number))
            if name in result:
                problems.append(f"{name} is there twice, once as {stored_name}")
            result[name] = tensor.lazy(*index)
    raise_problems("The distributed checkpoint does not fit the model:", problems)
    return _with_joined_halves(result)


def _pattern(stored_name: str) -> str:
    """The mapping's name, with ``<layer>`` and ``<expert>`` for the stacked dims."""
    name = stored_name
    stacked = _STACKED_LAYERS.fullmatch(name)
    if stacked:
        name = f"decoder.layers.{_LAYER}.{stacked[1]}"
    experts = _EXPERTS.fullmatch(name)
    if experts:
        name = f"{experts[1]}local_experts.{experts[2] or _EXPERT + '.'}{experts[3]}"
    return name


def _with_joined_halves(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    result = dict(tensors)
    for name in tensors:
        whole = name.removesuffix(_HALVES[0])
        other = whole + _HALVES[1]
        if whole == name or whole in tensors or other not in tensors:
            continue
        halves = [tensors[name], tensors[other]]
        if halves[0].shape == halves[1].shape and halves[0].dtype == halves[1].dtype:
            result[whole] = concat(halves)
            del result[name], result[other]
    return result


@dataclass(frozen=True)
class Place:
    """The place of one layer's or expert's tensor in a stored tensor.

    Attributes:
        key: Name of the stored tensor.
        index: Index in the stacked dims; empty if the tensor is stored alone.
        counts: Sizes of the stacked dims.
    """

    key: str
    index: Shape = ()
    counts: Shape = ()


def place_of(name: str, stacked: bool, config: ModelConfig) -> Place:
    """Where a tensor or object of the model is stored.

    Args:
        name: In a layout of :mod:`checkpoint_conversion.layouts`.
        stacked: Whether layers are stacked.
        config: The model's dimensions.
    """
    place = Place(name)
    layer = _NUMBERED_LAYER.fullmatch(name)
    if stacked and layer:
        place = Place(f"decoder.layers.{layer[2]}", (int(layer[1]),), (config.num_layers,))
    expert = _NUMBERED_EXPERT.fullmatch(place.key)
    if expert is None:
        return place
    index, counts = (*place.index, int(expert[2])), (*place.counts, config.num_experts)
    return Place(f"{expert[1]}experts.{expert[3]}", index, counts)


def extra_state_names(
    names: Iterable[str], norms: str, stacked: bool, config: ModelConfig
) -> list[str]:
    """Names of the ``_extra_state`` objects that Megatron's modules load beside their weights.

    Loading fails if one is missing. Core attention and output layer load none.

    Args:
        names: Names of the model's tensors, in a layout.
        norms: ``"fused"`` for TransformerEngine's modules, ``"separate"`` for local ones.
        stacked: Whether layers are stacked.
        config: The model's dimensions.
    """
    result = []
    for name in names:
        module, _, parameter = name.rpartition(".")
        is_norm = _NORM.fullmatch(module) is not None
        if parameter != "weight" or not (_LINEAR.fullmatch(module) or is_norm):
            continue
        if is_norm and norms == "separate":
            continue
        place = place_of(module + EXTRA_STATE, stacked, config)
        index, counts = place.index or (0,), place.counts or (1,)
        result.append(f"{place.key}/shard_{_dotted(index)}_{_dotted(counts)}")
    return result


def _dotted(numbers: Shape) -> str:
    return ".".join(map(str, numbers))
