"""Damaged and hostile distributed checkpoints: an error that says so, or the right values.

``FUZZ_EXAMPLES`` sets how many checkpoints each test tries.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint
from tests.conversion.support import load_all, random_tensors, tiny_config
from tests.conversion.torch_dist_support import write_torch_dist

# Few tensors and blocks, so that each checkpoint is read quickly.
CONFIG = tiny_config(
    num_hidden_layers=1,
    first_k_dense_replace=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    qk_nope_head_dim=8,
    v_head_dim=16,
)
fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "150")),
    deadline=10_000,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@dataclass(frozen=True, repr=False)
class Original:
    """A checkpoint in one file, and what its files held at first."""

    folder: Path
    metadata: bytes
    values: bytes
    tensors: dict[str, Tensor]

    @property
    def metadata_path(self) -> Path:
        return self.folder / ".metadata"

    @property
    def values_path(self) -> Path:
        return self.folder / "__0_0.distcp"

    def restore(self) -> None:
        """As it was."""
        self.metadata_path.write_bytes(self.metadata)
        self.values_path.write_bytes(self.values)

    def load(self) -> dict[str, Tensor] | None:
        """All values, of the shapes that the model has; None if there was a CheckpointError."""
        try:
            found = load_all(TorchDistCheckpoint(self.folder).hugging_face_tensors())
        except CheckpointError as error:
            assert str(error)
            return None
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        assert shapes == {name: tuple(t.shape) for name, t in self.tensors.items()}
        return found

    def check_values(self) -> None:
        """They are right, or there is a CheckpointError."""
        found = self.load()
        if found is not None:
            for name, tensor in self.tensors.items():
                assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch_dist")
    tensors = random_tensors(CONFIG)
    write_torch_dist(folder, CONFIG, tensors, "absorbed", part_bytes=1 << 30)
    # The arguments say what the model is.
    (folder / "release/hugging_face/config.json").unlink()
    inner = folder / "release"
    made = Original(
        inner, (inner / ".metadata").read_bytes(), (inner / "__0_0.distcp").read_bytes(), tensors
    )
    assert made.load() is not None
    return made


def changed(data, content, places):
    """Some bytes at the places set to any value."""
    result = bytearray(content)
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=8)):
        result[place] = data.draw(st.integers(0, 255))
    return bytes(result)


def cut(data, content):
    """A piece of the content lost or repeated, or everything after it lost."""
    start = data.draw(st.integers(0, len(content)))
    piece = content[start : start + data.draw(st.integers(0, 200))]
    repeated = piece * data.draw(st.integers(0, 2))
    rest = data.draw(st.sampled_from([b"", content[start + len(piece) :]]))
    return content[:start] + repeated + rest


@fuzz
@given(data=st.data())
def test_bytes_of_the_metadata_changed(original, data):
    """At an opcode or a little behind it, where lengths, numbers and indices are."""
    original.restore()
    starts = [position for _, _, position in pickletools.genops(original.metadata)]
    ends = len(original.metadata) - 1
    places = [min(start + step, ends) for start in starts for step in range(3)]
    original.metadata_path.write_bytes(changed(data, original.metadata, places))
    original.check_values()


@fuzz
@given(data=st.data())
def test_bytes_of_the_metadata_lost_or_repeated(original, data):
    original.restore()
    original.metadata_path.write_bytes(cut(data, original.metadata))
    original.check_values()


@fuzz
@given(content=st.binary(max_size=300))
def test_any_bytes_as_metadata(original, content):
    original.restore()
    original.metadata_path.write_bytes(b"\x80\x04" + content + b".")
    assert original.load() is None


def where_values_are(metadata, content):
    """The bytes of the file that are values of tensors, where any other byte is valid, too."""
    result = set()
    for info in pickle.loads(metadata).storage_data.values():
        piece = content[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(piece)) as archive:
            for entry in archive.infolist():
                if "/data/" in entry.filename:
                    name, extra = (
                        int.from_bytes(piece[entry.header_offset + at :][:2], "little")
                        for at in (26, 28)
                    )
                    start = info.offset + entry.header_offset + 30 + name + extra
                    result.update(range(start, start + entry.file_size))
    return result


@pytest.fixture(scope="module")
def around_values(original):
    values = where_values_are(original.metadata, original.values)
    return [place for place in range(len(original.values)) if place not in values]


@fuzz
@given(data=st.data())
def test_bytes_around_values_changed(original, around_values, data):
    """The pickles and directories of the files of torch.save; nothing has a checksum."""
    original.restore()
    original.values_path.write_bytes(changed(data, original.values, around_values))
    original.load()


@fuzz
@given(data=st.data())
def test_values_lost_or_repeated(original, data):
    original.restore()
    original.values_path.write_bytes(cut(data, original.values))
    original.load()


NUMBERS = st.one_of(
    st.integers(-3, 40), st.sampled_from([1 << 31, 1 << 62, -(1 << 62), 1 << 70]), st.none()
)
SIZES = st.lists(st.integers(-2, 70), max_size=4).map(torch.Size)


@fuzz
@given(data=st.data())
def test_any_fields(original, data):
    """Metadata that are what they should be, of somebody who means harm."""
    original.restore()
    metadata = pickle.loads(original.metadata)
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    tensors = [name for name, entry in entries.items() if hasattr(entry, "chunks")]
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["place", "size", "chunk", "dtype", "index", "name"]))
        name = data.draw(st.sampled_from(tensors))
        if kind == "place":
            index = data.draw(st.sampled_from(sorted(places, key=str)))
            file = data.draw(st.sampled_from(["__0_0.distcp", ".metadata", "metadata.json", ".."]))
            start = data.draw(st.one_of(NUMBERS, st.integers(0, len(original.values))))
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
    original.metadata_path.write_bytes(pickle.dumps(dataclasses.replace(metadata)))
    original.load()
