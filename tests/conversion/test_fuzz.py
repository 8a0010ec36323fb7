"""Damaged and hostile checkpoints: a CheckpointError that says so or values, never anything else.

``FUZZ_EXAMPLES`` sets how many checkpoints each test tries.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pickle
import pickletools
import struct
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
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
from checkpoint_conversion.formats import open_checkpoint, safetensors_file
from checkpoint_conversion.formats.hugging_face import HuggingFaceCheckpoint
from checkpoint_conversion.fp8 import quantise
from checkpoint_conversion.mapping import rows_by_name
from checkpoint_conversion.packed import INT4
from tests.conversion.legacy_support import change_rank, only_args_config, write_legacy
from tests.conversion.pt_support import records, write_records
from tests.conversion.support import (
    INDEX,
    load_all,
    random_tensors,
    tiny_config,
    write_hugging_face,
    write_torch_dist,
)
from tests.conversion.test_packed import packed_folder

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
SECRETS = ("secret.safetensors", "secret.json")
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
RANK, METADATA, VALUES_FILE = f"mp_rank_00/{RANK_FILE}", ".metadata", "__0_0.distcp"
# What is worth a try in place of something else.
TOKENS = [
    *(b'"../secret.safetensors"', b'"/etc/passwd"', b'""', b'"."', b'"sub/../../secret.json"'),
    *(b"-1", b"0", b"1e999", b"9" * 30, b"18446744073709551615", b"9223372036854775808"),
    *(b"null", b"true", b"[]", b"{}", b"[[[[", b'{"a":{"a":', b",", b'"', b"\\ud800", b"\\u0000"),
    *(b'"F8_E4M3"', b'"F8_E8M0"', b'"F4"', b'"C64"', b'"I64"', b"\0", b"\xff\xfe", b"\n", b"NaN"),
]
STRINGS = st.sampled_from(
    ["../secret.safetensors", "", "a\0b", "\ud800", FIRST, SECOND, INDEX, "F8_E4M3", "BF16"]
)
PLAIN = [
    *(st.none(), st.booleans(), st.floats(), st.text(max_size=5)),
    st.integers(-(2**65), 2**65),
    st.sampled_from([0, 1, -1, 2**31, 2**62, 2**63, 2**64 - 1, 10**300]),
]
JSON_VALUES = st.one_of(
    *PLAIN,
    STRINGS,
    st.lists(st.integers(0, 600), max_size=4),
    st.lists(st.sampled_from([0, 2**32, 2**63]), max_size=3),
)
SAME_SIZE = [
    ["F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "BOOL"],
    ["BF16", "F16", "I16", "U16"],
    ["F32", "I32", "U32"],
]
fuzzed = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "50")),
    # Of the clock; a busy disk can take any time. Original.load watches the processor's.
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
fuzzed_alike = settings(fuzzed, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def opened_files() -> Iterator[list[Path]]:
    """Every path that Python or safetensors opens."""
    # An audit hook stays for ever; this one becomes idle.
    listening = [True]

    def hook(event: str, arguments: tuple) -> None:
        if listening and event == "open" and isinstance(arguments[0], str):
            OPENED.append(Path(arguments[0]))

    def watched(path, *arguments, **options):
        OPENED.append(Path(path))
        return original(path, *arguments, **options)

    sys.addaudithook(hook)
    original = safetensors_file.safe_open
    safetensors_file.safe_open = watched
    yield OPENED
    safetensors_file.safe_open = original
    listening.clear()


OPENED: list[Path] = []


@dataclass(frozen=True, repr=False)
class Original:
    """A good checkpoint: its folder, the bytes of the files that tests damage, its tensors.

    Beside the folder are secrets.
    """

    folder: Path
    files: dict[str, bytes]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, folder: Path, tensors: dict[str, Tensor], *names: str) -> Original:
        files = {name: (folder / name).read_bytes() for name in names}
        made = cls(folder.resolve(), files, tensors)
        for name in SECRETS:
            (made.folder.parent / name).write_bytes(b"secret")
        assert made.load(right_values=True)
        return made

    def damage(self, files: dict[str, bytes]) -> None:
        """Replace some files; all others are as they were."""
        for name, content in (self.files | files).items():
            (self.folder / name).write_bytes(content)

    def load(self, right_values: bool = False, right_names: bool = True) -> bool:
        """Read everything inside, names, shapes and perhaps values right, in bounded time.

        False if there was a CheckpointError, which can be printed.
        """
        OPENED.clear()
        started = time.process_time()
        try:
            lazy = open_checkpoint(self.folder).hugging_face_tensors()
            found = load_all(lazy)
        except CheckpointError as error:
            assert str(error).encode()
            found = None
        assert time.process_time() - started < 10
        sandbox = self.folder.parent
        for path in OPENED:
            resolved = path.resolve()
            inside = resolved.is_relative_to(self.folder)
            assert inside or not resolved.is_relative_to(sandbox), path
            assert inside or path.suffix not in (".safetensors", ".json"), path
        if found is None:
            return False
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        assert shapes == {name: tensor.shape for name, tensor in lazy.items()}
        if right_names:
            assert shapes == {name: tuple(t.shape) for name, t in self.tensors.items()}
        if right_values:
            for name, tensor in self.tensors.items():
                assert torch.equal(found[name], tensor), name
        return True


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory) -> Original:
    """FP8 weights, experts in INT4, and an MTP layer."""
    base = tmp_path_factory.mktemp("hugging_face")
    packed, stored, _ = packed_folder(base / "packed", INT4, num_nextn_predict_layers=1)
    config = HuggingFaceCheckpoint(packed).config
    for name, row in rows_by_name(config).items():
        if row.fp8 and name in stored:
            stored[name], stored[f"{name}_scale_inv"], _ = quantise(stored[name], "float", name)
    folder = write_hugging_face(base / "checkpoint", config, stored)
    files = sorted(file.name for file in folder.iterdir())
    assert files == ["config.json", FIRST, SECOND, INDEX]
    tensors = load_all(HuggingFaceCheckpoint(folder).hugging_face_tensors())
    return Original.of(folder, tensors, *files)


@pytest.fixture(scope="module")
def legacy(tmp_path_factory) -> Original:
    """One rank; the arguments say what the model is."""
    folder, tensors = tmp_path_factory.mktemp("legacy"), random_tensors(EXPERTS)
    write_legacy(folder, EXPERTS, tensors, vocab_multiple=1)
    only_args_config(folder)
    return Original.of(folder / "release", tensors, RANK)


@pytest.fixture(scope="module")
def torch_dist(tmp_path_factory) -> Original:
    """All values in one file; the arguments say what the model is."""
    folder, tensors = tmp_path_factory.mktemp("torch_dist"), random_tensors(BLOCKS)
    write_torch_dist(folder, BLOCKS, tensors, "absorbed", part_bytes=1 << 30)
    only_args_config(folder)
    return Original.of(folder / "release", tensors, METADATA, VALUES_FILE)


def test_files_are_watched(hugging_face):
    assert hugging_face.load(right_values=True)
    assert set(hugging_face.files) <= {path.name for path in OPENED}


@st.composite
def damage(draw, data: bytes) -> bytes:
    """Flipped bits, cuts, repeated pieces and inserted tokens, mostly near the start."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        near = min(len(result), draw(st.sampled_from([9, 200, 15_000, 1 << 30])))
        position = draw(st.integers(0, max(0, near - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "drop", "splice", "fill", "token", "size"]))
        length = draw(st.integers(1, 40))
        if kind == "flip" and position < len(result):
            result[position] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del result[position:]
        elif kind == "drop":
            del result[position : position + length]
        elif kind == "splice":
            start = draw(st.integers(0, max(0, len(result) - 1)))
            piece = result[start : start + length]
            result[position : position + draw(st.sampled_from([0, length]))] = piece
        elif kind == "fill":
            # 0x7f and 0xff are FP8's numbers that are none.
            result[position : position + length] = bytes(
                [draw(st.sampled_from([0x00, 0x7F, 0x80, 0xFF]))] * length
            )
        elif kind == "token":
            result[position : position + draw(st.integers(0, 12))] = draw(st.sampled_from(TOKENS))
        else:
            size = draw(st.sampled_from([0, 1, len(result), 2**31, 2**63, 2**64 - 1]))
            result[:8] = struct.pack("<Q", size)
    return bytes(result)


def changed(draw: st.DrawFn, document: dict) -> dict:
    """A JSON document with some values, names or structure replaced."""
    for _ in range(draw(st.integers(1, 3))):
        place = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if isinstance(inner, dict | list) and draw(st.integers(0, 3)):
                place = inner
                continue
            kind = draw(st.sampled_from(["value", "remove", "rename"]))
            if kind == "value" or isinstance(place, list):
                likely = isinstance(inner, str) and draw(st.booleans())
                place[key] = draw(STRINGS if likely else JSON_VALUES)
            elif kind == "remove":
                del place[key]
            else:
                place[draw(st.text(max_size=8))] = place.pop(key)
            break
    return document


def retold(draw: st.DrawFn, header: dict) -> dict:
    """Other dtypes, shapes or names for the same bytes; safetensors has nothing against it."""
    header.pop("__metadata__")
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(list(header)))
        tensor = header[name]
        kind = draw(st.sampled_from(["dtype", "shape", "name"]))
        if kind == "dtype":
            group = next((g for g in SAME_SIZE if tensor["dtype"] in g), [tensor["dtype"]])
            tensor["dtype"] = draw(st.sampled_from(group))
        elif kind == "shape":
            shape = tensor["shape"]
            others = [[math.prod(shape)], shape[::-1], [1, *shape], [*shape, 1]]
            tensor["shape"] = draw(st.sampled_from(others))
        else:
            other = draw(st.sampled_from([*header, f"{name}_scale_inv", f"{name}_packed", "x"]))
            header[name], header[other] = header.get(other, tensor), tensor
            if header[name] is tensor:
                del header[name]
    return header


@fuzzed
@given(data=st.data())
def test_damaged_bytes(data, hugging_face):
    name = data.draw(st.sampled_from(sorted(hugging_face.files)))
    hugging_face.damage({name: data.draw(damage(hugging_face.files[name]))})
    hugging_face.load(right_names=False)


@fuzzed
@given(data=st.data())
def test_changed_header(data, hugging_face):
    """What is still JSON gets further than damaged bytes."""
    name = data.draw(st.sampled_from([FIRST, SECOND]))
    file = hugging_face.files[name]
    (size,) = struct.unpack("<Q", file[:8])
    change = data.draw(st.sampled_from([changed, retold]))
    text = json.dumps(change(data.draw, json.loads(file[8 : 8 + size]))).encode()
    hugging_face.damage({name: struct.pack("<Q", len(text)) + text + file[8 + size :]})
    hugging_face.load(right_names=False)


@fuzzed
@given(data=st.data())
def test_changed_json(data, hugging_face):
    name = data.draw(st.sampled_from([INDEX, "config.json"]))
    document = changed(data.draw, json.loads(hugging_face.files[name]))
    hugging_face.damage({name: json.dumps(document).encode()})
    hugging_face.load(right_names=False)


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
    metadata, content = torch_dist.files[METADATA], torch_dist.files[VALUES_FILE]
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
    return Target(torch_dist, VALUES_FILE, places, False, False)


@fuzzed_alike
@given(data=st.data())
def test_bytes_changed(target, data):
    result = bytearray(target.content)
    for place in data.draw(st.lists(st.sampled_from(target.places), min_size=1, max_size=8)):
        result[place] = data.draw(st.integers(0, 255))
    target.original.damage({target.name: bytes(result)})
    target.original.load(right_values=target.after_change)


@fuzzed_alike
@given(data=st.data())
def test_bytes_lost_or_repeated(target, data):
    content = target.content
    start = data.draw(st.integers(0, len(content)))
    piece = content[start : start + data.draw(st.integers(0, 200))]
    repeated = piece * data.draw(st.integers(0, 2))
    rest = data.draw(st.sampled_from([b"", content[start + len(piece) :]]))
    target.original.damage({target.name: content[:start] + repeated + rest})
    target.original.load(right_values=target.after_cut)


@fuzzed_alike
@given(data=st.data())
def test_the_pickle_of_a_rank_changed(legacy, data):
    """With checksums that fit, as somebody would make them who means harm."""
    legacy.damage({})
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


@fuzzed_alike
@given(content=st.binary(max_size=300), name=st.sampled_from(["data.pkl", "data/0", "byteorder"]))
def test_any_bytes_as_a_record(legacy, content, name):
    legacy.damage({})
    entries = records(legacy.folder / RANK)
    entries.update({key: content for key in entries if key.endswith(f"/{name}")})
    write_records(legacy.folder / RANK, entries)
    legacy.load()


@fuzzed_alike
@given(content=st.binary(max_size=300))
def test_any_bytes_as_metadata(torch_dist, content):
    torch_dist.damage({METADATA: b"\x80\x04" + content + b"."})
    assert not torch_dist.load()


@fuzzed_alike
@given(data=st.data())
def test_any_arguments(legacy, data):
    """Whatever the training's arguments say; config.json is not there to overrule them."""
    legacy.damage({})
    values = st.one_of(*PLAIN, st.lists(st.integers(-5, 5), max_size=4), st.just(torch.float16))

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


@fuzzed_alike
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
            file = data.draw(st.sampled_from([VALUES_FILE, METADATA, "metadata.json", ".."]))
            start = data.draw(
                st.one_of(NUMBERS, st.integers(0, len(torch_dist.files[VALUES_FILE])))
            )
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
    torch_dist.damage({METADATA: pickle.dumps(dataclasses.replace(metadata))})
    torch_dist.load()
