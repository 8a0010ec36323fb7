"""Damaged and hostile Hugging Face folders: an error that says so, or values; never anything else.

FUZZ_EXAMPLES sets how many folders each test makes.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import safetensors_file
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.formats.hugging_face import HuggingFaceCheckpoint
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import (
    INDEX,
    random_tensors,
    rewritten,
    tiny_config,
    write_hugging_face,
)

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
SECRET = "secret.safetensors"
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
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.sampled_from([0, 1, -1, 2**31, 2**62, 2**63, 2**64 - 1]),
    st.text(max_size=4),
    STRINGS,
    st.lists(st.integers(0, 600), max_size=4),
    st.lists(st.sampled_from([0, 2**32, 2**63]), max_size=3),
    st.floats(),
)
SAME_SIZE = [
    ["F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "BOOL"],
    ["BF16", "F16", "I16", "U16"],
    ["F32", "I32", "U32"],
]
fuzzed = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "150")),
    # Of the clock; a busy disk can take any time. check() watches the processor's.
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Files(dict[str, bytes]):
    """Contents by name; a failing test need not show all of them."""

    def __repr__(self) -> str:
        return f"<{', '.join(self)}>"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Files:
    """The files of a good checkpoint with FP8 weights and an MTP layer."""
    config = tiny_config(num_nextn_predict_layers=1)
    base = tmp_path_factory.mktemp("good")
    write_hugging_face(base / "a", config, random_tensors(config), shards=1)
    source = HuggingFaceCheckpoint(base / "a")
    rewritten(source, base / "b", TargetOptions(fp8="float"), part_bytes=70_000)
    files = Files((file.name, file.read_bytes()) for file in sorted((base / "b").iterdir()))
    assert set(files) == {"config.json", INDEX, FIRST, SECOND}
    return files


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory) -> Path:
    """A folder with secrets; the checkpoints are made in a folder inside."""
    outside = tmp_path_factory.mktemp("fuzz")
    (outside / "checkpoint").mkdir()
    for name in (SECRET, "secret.json"):
        (outside / name).write_bytes(b"secret")
    return outside


@pytest.fixture(scope="module", autouse=True)
def opened_files(sandbox):
    """Every path that Python or safetensors opens."""
    paths: list[Path] = []
    # An audit hook stays for ever; this one becomes idle.
    listening = [True]

    def hook(event: str, arguments: tuple) -> None:
        if listening and event == "open" and isinstance(arguments[0], str):
            paths.append(Path(arguments[0]))

    def watched(path, *arguments, **options):
        paths.append(Path(path))
        return original(path, *arguments, **options)

    sys.addaudithook(hook)
    original = safetensors_file.safe_open
    safetensors_file.safe_open = watched
    yield paths
    safetensors_file.safe_open = original
    listening.clear()


def check(sandbox: Path, files: dict[str, bytes], opened: list[Path]) -> bool:
    """Read all of it, or be told that it is damaged; whether it could be read."""
    folder = sandbox / "checkpoint"
    for name, data in files.items():
        (folder / name).write_bytes(data)
    opened.clear()
    started = time.process_time()
    try:
        checkpoint = HuggingFaceCheckpoint(folder)
        tensors = checkpoint.hugging_face_tensors()
        for tensor in tensors.values():
            with ReadSession() as session:
                values = tensor.load(session)
                assert tuple(values.shape) == tensor.shape
                assert values.dtype == tensor.dtype
                # Every byte is there.
                values.sum().item()
        readable = True
    except CheckpointError as error:
        # It can be printed.
        str(error).encode()
        readable = False
    assert time.process_time() - started < 10
    for path in opened:
        resolved = path.resolve()
        inside = resolved.is_relative_to(folder)
        assert inside or not resolved.is_relative_to(sandbox), path
        assert inside or path.suffix not in (".safetensors", ".json"), path
    return readable


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
                place[key] = draw(STRINGS if likely else VALUES)
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
            other = draw(st.sampled_from([*header, f"{name}_scale_inv", "x"]))
            header[name], header[other] = header.get(other, tensor), tensor
            if header[name] is tensor:
                del header[name]
    return header


@fuzzed
@given(data=st.data())
def test_damaged_bytes(data, good, sandbox, opened_files):
    name = data.draw(st.sampled_from(sorted(good)))
    damaged = data.draw(damage(good[name]))
    check(sandbox, {**good, name: damaged}, opened_files)


@fuzzed
@given(data=st.data())
def test_changed_header(data, good, sandbox, opened_files):
    """What is still JSON gets further than damaged bytes."""
    name = data.draw(st.sampled_from([FIRST, SECOND]))
    (size,) = struct.unpack("<Q", good[name][:8])
    header = json.loads(good[name][8 : 8 + size])
    change = data.draw(st.sampled_from([changed, retold]))
    text = json.dumps(change(data.draw, header)).encode()
    file = struct.pack("<Q", len(text)) + text + good[name][8 + size :]
    check(sandbox, {**good, name: file}, opened_files)


@fuzzed
@given(data=st.data())
def test_changed_json(data, good, sandbox, opened_files):
    name = data.draw(st.sampled_from([INDEX, "config.json"]))
    document = changed(data.draw, json.loads(good[name]))
    check(sandbox, {**good, name: json.dumps(document).encode()}, opened_files)


def test_what_is_not_damaged_can_be_read(good, sandbox, opened_files):
    """Or the others would pass whatever they do; also that the files are watched."""
    assert check(sandbox, good, opened_files)
    names = {path.name for path in opened_files}
    assert set(good) <= names
