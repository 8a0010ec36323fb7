"""Damaged and hostile per-rank files: an error that says so, or the right values; nothing else.

``FUZZ_EXAMPLES`` sets how many files each test tries.
"""

from __future__ import annotations

import os
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoint_conversion.checkpoint_folder import RANK_FILE
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from tests.conversion.legacy_support import change_rank, only_args_config, write_legacy
from tests.conversion.pt_support import records, write_records
from tests.conversion.support import load_all, random_tensors, tiny_config

CONFIG = tiny_config(num_hidden_layers=2, n_routed_experts=2, n_group=1, num_experts_per_tok=1)
RANK = f"release/mp_rank_00/{RANK_FILE}"
fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "150")),
    deadline=10_000,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@dataclass(frozen=True, repr=False)
class Original:
    """A checkpoint of one rank."""

    folder: Path
    content: bytes
    tensors: dict[str, Tensor]

    @property
    def path(self) -> Path:
        return self.folder / RANK

    def check_values(self) -> None:
        """What is in the folder now has the right values, or it is a CheckpointError."""
        found = self.load()
        if found is not None:
            assert set(found) == set(self.tensors)
            for name, tensor in self.tensors.items():
                assert torch.equal(found[name], tensor), name

    def load(self) -> dict[str, Tensor] | None:
        """All values, of the shapes that the model has; None if there was a CheckpointError."""
        try:
            found = load_all(LegacyCheckpoint(self.folder).hugging_face_tensors())
        except CheckpointError as error:
            assert str(error)
            return None
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        assert shapes == {name: tuple(t.shape) for name, t in self.tensors.items()}
        return found


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("legacy")
    tensors = random_tensors(CONFIG)
    write_legacy(folder, CONFIG, tensors, vocab_multiple=1)
    only_args_config(folder)
    return Original(folder, (folder / RANK).read_bytes(), tensors)


def where_values_are(path):
    """The bytes of the file that are values of tensors, where any other byte is valid, too."""
    result = set()
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for entry in archive.infolist():
            if "/data/" in entry.filename:
                file.seek(entry.header_offset + 26)
                lengths = file.read(4)
                skipped = int.from_bytes(lengths[:2], "little")
                skipped += int.from_bytes(lengths[2:], "little")
                start = entry.header_offset + 30 + skipped
                result.update(range(start, start + entry.file_size))
    return result


@fuzz
@given(data=st.data())
def test_bytes_changed(original, data):
    """Anywhere but in the values, whose checksums torch does not look at."""
    original.path.write_bytes(original.content)
    values = where_values_are(original.path)
    places = [place for place in range(len(original.content)) if place not in values]
    changed = bytearray(original.content)
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=8)):
        changed[place] = data.draw(st.integers(0, 255))
    original.path.write_bytes(changed)
    original.check_values()


@fuzz
@given(data=st.data())
def test_bytes_lost_or_repeated(original, data):
    content = original.content
    start = data.draw(st.integers(0, len(content)))
    piece = content[start : start + data.draw(st.integers(0, 200))]
    repeated = piece * data.draw(st.integers(0, 2))
    rest = data.draw(st.sampled_from([b"", content[start + len(piece) :]]))
    original.path.write_bytes(content[:start] + repeated + rest)
    original.load()


@fuzz
@given(data=st.data())
def test_the_pickle_changed(original, data):
    """With checksums that fit, as somebody would make them who means harm."""
    original.path.write_bytes(original.content)
    entries = records(original.path)
    name = next(name for name in entries if name.endswith("data.pkl"))
    pickled = bytearray(entries[name])
    starts = [position for _, _, position in pickletools.genops(entries[name])]
    for _ in range(data.draw(st.integers(1, 4))):
        # At an opcode and a little behind it, where lengths and numbers are.
        place = data.draw(st.sampled_from(starts)) + data.draw(st.integers(0, 3))
        if place < len(pickled):
            pickled[place] = data.draw(st.integers(0, 255))
    write_records(original.path, entries | {name: bytes(pickled)})
    original.load()


@fuzz
@given(content=st.binary(max_size=300), name=st.sampled_from(["data.pkl", "data/0", "byteorder"]))
def test_any_bytes_as_a_record(original, content, name):
    original.path.write_bytes(original.content)
    entries = records(original.path)
    entries.update({key: content for key in entries if key.endswith(f"/{name}")})
    write_records(original.path, entries)
    original.load()


@fuzz
@given(data=st.data())
def test_any_arguments(original, data):
    """Whatever the training's arguments say; config.json is not there to overrule them."""
    original.path.write_bytes(original.content)
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

    change_rank(original.path.parent, change)
    try:
        LegacyCheckpoint(original.folder).hugging_face_tensors()
    except CheckpointError as error:
        assert str(error)
