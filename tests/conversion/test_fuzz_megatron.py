"""Damaged and hostile Megatron checkpoints: a CheckpointError or right values, nothing else.

``FUZZ_EXAMPLES`` sets how many checkpoints each test tries.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from checkpoint_conversion.checkpoint_folder import RANK_FILE
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import open_checkpoint
from tests.conversion.legacy_support import change_rank, only_args_config, write_legacy
from tests.conversion.pt_support import records, write_records
from tests.conversion.support import load_all, random_tensors, tiny_config, write_torch_dist

# Few tensors and blocks, so that each checkpoint is read quickly.
EXPERTS = tiny_config(num_hidden_layers=2, n_routed_experts=2, n_group=1, num_experts_per_tok=1)
BLOCKS = tiny_config(
    num_hidden_layers=1,
    first_k_dense_replace=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    qk_nope_head_dim=8,
    v_head_dim=16,
)
RANK, METADATA, VALUES = f"mp_rank_00/{RANK_FILE}", ".metadata", "__0_0.distcp"
fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "150")),
    deadline=10_000,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@dataclass(frozen=True, repr=False)
class Original:
    """A good checkpoint: its folder, the bytes of the files that tests damage, its tensors."""

    folder: Path
    files: dict[str, bytes]
    tensors: dict[str, Tensor]

    def damage(self, name: str, content: bytes) -> None:
        """Replace one file; all others are as they were."""
        for file, good in self.files.items():
            (self.folder / file).write_bytes(content if file == name else good)

    def load(self, right_values: bool = False) -> bool:
        """Read everything, names, shapes and perhaps values right; False on a CheckpointError."""
        try:
            found = load_all(open_checkpoint(self.folder).hugging_face_tensors())
        except CheckpointError as error:
            assert str(error)
            return False
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        assert shapes == {name: tuple(t.shape) for name, t in self.tensors.items()}
        if right_values:
            for name, tensor in self.tensors.items():
                assert torch.equal(found[name], tensor), name
        return True


@pytest.fixture(scope="module")
def legacy(tmp_path_factory) -> Original:
    """One rank; the arguments say what the model is."""
    folder, tensors = tmp_path_factory.mktemp("legacy"), random_tensors(EXPERTS)
    write_legacy(folder, EXPERTS, tensors, vocab_multiple=1)
    return original(folder, tensors, RANK)


@pytest.fixture(scope="module")
def torch_dist(tmp_path_factory) -> Original:
    """All values in one file; the arguments say what the model is."""
    folder, tensors = tmp_path_factory.mktemp("torch_dist"), random_tensors(BLOCKS)
    write_torch_dist(folder, BLOCKS, tensors, "absorbed", part_bytes=1 << 30)
    return original(folder, tensors, METADATA, VALUES)


def original(folder: Path, tensors: dict[str, Tensor], *files: str) -> Original:
    only_args_config(folder)
    inner = folder / "release"
    made = Original(inner, {name: (inner / name).read_bytes() for name in files}, tensors)
    assert made.load(right_values=True)
    return made


def values_in(archive: bytes, start: int = 0) -> set[int]:
    """Positions of tensor values in a file of torch.save, where any other byte is valid, too."""
    result = set()
    with zipfile.ZipFile(io.BytesIO(archive)) as content:
        for entry in content.infolist():
            if "/data/" in entry.filename:
                header = archive[entry.header_offset :][:30]
                skipped = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
                first = start + entry.header_offset + 30 + skipped
                result.update(range(first, first + entry.file_size))
    return result


@dataclass(frozen=True, repr=False)
class Target:
    """A file to damage.

    Attributes:
        original: The checkpoint.
        name: Name of the file.
        places: Positions whose bytes are changed.
        after_change: Whether a change at these positions is either refused or has no effect.
        after_cut: Whether a cut is either refused or has no effect.
    """

    original: Original
    name: str
    places: Sequence[int]
    after_change: bool
    after_cut: bool

    @property
    def content(self) -> bytes:
        return self.original.files[self.name]


@pytest.fixture(scope="module", params=["rank file", "metadata", "values"])
def target(request, legacy, torch_dist) -> Target:
    if request.param == "rank file":
        content = legacy.files[RANK]
        values = values_in(content)
        places = [place for place in range(len(content)) if place not in values]
        # The pickle has a checksum; the values have none that torch looks at.
        return Target(legacy, RANK, places, True, False)
    metadata, content = torch_dist.files[METADATA], torch_dist.files[VALUES]
    if request.param == "metadata":
        # An opcode or the bytes behind it, which are lengths, numbers and memo indices.
        starts = [position for _, _, position in pickletools.genops(metadata)]
        places = [min(at + step, len(metadata) - 1) for at in starts for step in range(3)]
        return Target(torch_dist, METADATA, places, True, True)
    values = set()
    for info in pickle.loads(metadata).storage_data.values():
        values |= values_in(content[info.offset : info.offset + info.length], info.offset)
    # Pickles and archive directories, none with a checksum.
    places = [place for place in range(len(content)) if place not in values]
    return Target(torch_dist, VALUES, places, False, False)


@fuzz
@given(data=st.data())
def test_bytes_changed(target, data):
    result = bytearray(target.content)
    for place in data.draw(st.lists(st.sampled_from(target.places), min_size=1, max_size=8)):
        result[place] = data.draw(st.integers(0, 255))
    target.original.damage(target.name, bytes(result))
    target.original.load(right_values=target.after_change)


@fuzz
@given(data=st.data())
def test_bytes_lost_or_repeated(target, data):
    content = target.content
    start = data.draw(st.integers(0, len(content)))
    piece = content[start : start + data.draw(st.integers(0, 200))]
    repeated = piece * data.draw(st.integers(0, 2))
    rest = data.draw(st.sampled_from([b"", content[start + len(piece) :]]))
    target.original.damage(target.name, content[:start] + repeated + rest)
    target.original.load(right_values=target.after_cut)


@fuzz
@given(data=st.data())
def test_the_pickle_of_a_rank_changed(legacy, data):
    """With checksums that fit, as somebody would make them who means harm."""
    legacy.damage("", b"")
    path = legacy.folder / RANK
    entries = records(path)
    name = next(name for name in entries if name.endswith("data.pkl"))
    pickled = bytearray(entries[name])
    starts = [position for _, _, position in pickletools.genops(entries[name])]
    for _ in range(data.draw(st.integers(1, 4))):
        # At an opcode and a little behind it, where lengths and numbers are.
        place = data.draw(st.sampled_from(starts)) + data.draw(st.integers(0, 3))
        if place < len(pickled):
            pickled[place] = data.draw(st.integers(0, 255))
    write_records(path, entries | {name: bytes(pickled)})
    legacy.load()


@fuzz
@given(content=st.binary(max_size=300), name=st.sampled_from(["data.pkl", "data/0", "byteorder"]))
def test_any_bytes_as_a_record(legacy, content, name):
    legacy.damage("", b"")
    entries = records(legacy.folder / RANK)
    entries.update({key: content for key in entries if key.endswith(f"/{name}")})
    write_records(legacy.folder / RANK, entries)
    legacy.load()


@fuzz
@given(content=st.binary(max_size=300))
def test_any_bytes_as_metadata(torch_dist, content):
    torch_dist.damage(METADATA, b"\x80\x04" + content + b".")
    assert not torch_dist.load()


@fuzz
@given(data=st.data())
def test_any_arguments(legacy, data):
    """Whatever the training's arguments say; config.json is not there to overrule them."""
    legacy.damage("", b"")
    values = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.lists(st.integers(-5, 5), max_size=4),
        st.just(10**300),
        st.just(torch.float16),
    )

    def change(content):
        args = vars(content["args"])
        for name in data.draw(st.lists(st.sampled_from(sorted(args)), min_size=1, max_size=3)):
            args[name] = data.draw(values)

    change_rank(legacy.folder / "mp_rank_00", change)
    try:
        open_checkpoint(legacy.folder).hugging_face_tensors()
    except CheckpointError as error:
        assert str(error)


NUMBERS = st.one_of(
    st.integers(-3, 40), st.sampled_from([1 << 31, 1 << 62, -(1 << 62), 1 << 70]), st.none()
)
SIZES = st.lists(st.integers(-2, 70), max_size=4).map(torch.Size)


@fuzz
@given(data=st.data())
def test_any_fields(torch_dist, data):
    """Well-formed metadata of somebody who means harm."""
    metadata = pickle.loads(torch_dist.files[METADATA])
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    tensors = [name for name, entry in entries.items() if hasattr(entry, "chunks")]
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["place", "size", "chunk", "dtype", "index", "name"]))
        name = data.draw(st.sampled_from(tensors))
        if kind == "place":
            index = data.draw(st.sampled_from(sorted(places, key=str)))
            file = data.draw(st.sampled_from([VALUES, METADATA, "metadata.json", ".."]))
            start = data.draw(st.one_of(NUMBERS, st.integers(0, len(torch_dist.files[VALUES]))))
            places[index] = _StorageInfo(file, start, data.draw(NUMBERS))
        elif kind == "size":
            entries[name].size = data.draw(SIZES)
        elif kind == "chunk":
            chunk = ChunkStorageMetadata(data.draw(SIZES), data.draw(SIZES))
            entries[name].chunks[data.draw(st.integers(-1, 0))] = chunk
        elif kind == "dtype":
            entries[name].properties.dtype = data.draw(
                st.sampled_from([torch.int64, torch.float8_e4m3fn, torch.complex64, torch.bits16])
            )
        elif kind == "index":
            index = data.draw(st.sampled_from(sorted(places, key=str)))
            places[MetadataIndex(name, data.draw(SIZES))] = places.pop(index)
        else:
            other = data.draw(st.sampled_from(tensors))
            entries[name], entries[other] = entries[other], entries[name]
    torch_dist.damage(METADATA, pickle.dumps(dataclasses.replace(metadata)))
    torch_dist.load()
