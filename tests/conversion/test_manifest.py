"""The manifest: written beside the weights, and not believed when it is read."""

import copy
import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_conversion.checkpoint_folder import TRACKER
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.manifest import (
    NAME,
    Manifest,
    find_manifest,
    read_manifest,
    tensor_record,
    weights_folder,
    write_manifest,
)
from tests.conversion.support import refused

RECORD = tensor_record(
    "k", torch.ones(2, 4, dtype=torch.bfloat16), "dir/a", (0, 4), fp8_error={"max": 0.5}
)
MANIFEST = Manifest(
    tool_version="1",
    source={"format": "hf"},
    target={"format": "megatron"},
    left_out={"x": "why"},
    files={"dir/a": 1},
    tensors=(RECORD, dataclasses.replace(RECORD, offset=None, file="c")),
    conversion="0" * 64,
)


@pytest.fixture
def document(tmp_path) -> dict:
    return json.loads(write_manifest(MANIFEST, tmp_path).read_text())


def test_comes_back(tmp_path):
    assert read_manifest(write_manifest(MANIFEST, tmp_path)) == MANIFEST


@pytest.mark.parametrize(
    ("text", "folder"),
    [("release\n", "release"), ("100", "iter_0000100"), (None, "")],
)
def test_is_where_the_weights_are(tmp_path, text, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    if text is not None:
        (tmp_path / TRACKER).write_text(text)
    assert weights_folder(tmp_path) == tmp_path / folder
    assert find_manifest(tmp_path) is None
    assert write_manifest(MANIFEST, tmp_path) == tmp_path / folder / NAME
    assert find_manifest(tmp_path) == tmp_path / folder / NAME


@pytest.mark.parametrize("text", ["../..", "", "٣", "\0\x1b[2J", "100", "release"])
def test_what_names_the_iteration_is_named(tmp_path, text):
    """Where it is damaged, or names a folder that is not there, with those that are."""
    (tmp_path / TRACKER).write_text(text)
    (tmp_path / "iter_0000007").mkdir()
    with refused(TRACKER, "iter_0000007", repr(text)):
        weights_folder(tmp_path)


BAD_FIELDS = {
    "format_version": 2,
    "algorithm": "md5",
    "tool_version": 1,
    "left_out": {"x": 1},
    "files": {"../a": 1},
    "tensors": {},
    "extra": 1,
}
BAD_RECORD_FIELDS = {
    "key": 1,
    "offset": [-1],
    "shape": [True],
    "dtype": None,
    "checksum": "xyz",
    "file": "../../etc/passwd",
    "fp8_error": {"max": "big"},
    "extra": 1,
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_fields_are_refused(tmp_path, document, name):
    check_refused(tmp_path, json.dumps({**document, name: BAD_FIELDS[name]}), name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *BAD_RECORD_FIELDS.items(),
        *(("file", file) for file in ["/etc/passwd", "a/../../b", "", "a\\b", "a\0b", 3]),
    ],
)
def test_bad_records_are_refused(tmp_path, document, name, value):
    """Above all files outside the folder."""
    document["tensors"][1][name] = value
    check_refused(tmp_path, json.dumps(document), "tensors[1]")


@pytest.mark.parametrize("name", ["tensors", "algorithm", "source"])
def test_missing_fields_are_refused(tmp_path, document, name):
    del document[name]
    check_refused(tmp_path, json.dumps(document), name)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[" * 100_000, '{"format_version": 1', "\ud800"]
)
def test_other_files_are_refused(tmp_path, text):
    check_refused(tmp_path, text, "")


def test_absurd_size_is_refused_unread(tmp_path):
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(1 << 40)
    with refused("bytes"):
        read_manifest(tmp_path / NAME)


def check_refused(tmp_path, text: str, part: str) -> None:
    (tmp_path / NAME).write_bytes(text.encode(errors="surrogatepass"))
    with refused(part):
        read_manifest(tmp_path / NAME)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_anything_is_read_or_refused(tmp_path_factory, data):
    """One value somewhere is replaced by any other."""
    path = tmp_path_factory.getbasetemp() / NAME
    write_manifest(MANIFEST, path.parent)
    document = json.loads(path.read_text())
    place = document
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
    before = copy.deepcopy(document)
    place[key] = data.draw(json_values)
    path.write_text(json.dumps(document))
    try:
        read = read_manifest(path)
    except CheckpointError:
        return
    assert len(read.tensors) == len(document["tensors"])
    assert document.keys() == before.keys()
