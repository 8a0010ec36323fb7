"""Distributed checkpoints that contradict themselves, or want what no checkpoint may."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

from checkpoint_conversion.checkpoint_folder import kind_of
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import random_tensors, tiny_config
from tests.conversion.torch_dist_support import read_torch_dist, write_torch_dist

NORM = "decoder.final_layernorm.weight"
KV_UP = "decoder.layers.self_attention.linear_kv_up_proj.weight"
FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small checkpoint of stacked layers, halves of gated weights and row blocks."""
    folder = tmp_path_factory.mktemp("made")
    config = tiny_config(first_k_dense_replace=3)
    write_torch_dist(folder, config, random_tensors(config), "absorbed")
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy to change."""
    return Path(shutil.copytree(made, tmp_path / "made")) / "release"


def change(folder, function):
    """Change the metadata with ``function(entries, places)``."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    function(metadata.state_dict_metadata, metadata.storage_data)
    path.write_bytes(pickle.dumps(metadata))


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        TorchDistCheckpoint(folder).hugging_face_tensors()
    for word in words:
        assert word in str(caught.value), word
    return caught.value


def place(places, name):
    """The first of a tensor's chunks: its index and where it is."""
    return next((index, info) for index, info in places.items() if index.fqn == name)


class TestPlaces:
    @pytest.mark.parametrize(
        ("field", "value", "word"),
        [
            ("relative_path", "../../outside.distcp", "leads out of the folder"),
            ("relative_path", "/etc/passwd", "is an absolute path"),
            ("relative_path", "link.distcp", "is a link out of the folder"),
            ("relative_path", "hugging_face", "is not a regular file"),
            ("relative_path", "absent.distcp", "1 of the 8 files that .metadata names are missing"),
            ("relative_path", "a\nb", "cannot be printed"),
            ("relative_path", "", "is an empty name"),
            ("relative_path", None, "is not stored"),
            ("offset", -1, "is not within"),
            ("offset", 1 << 70, "is not within"),
            ("offset", "1", "is not within"),
            ("offset", 1.0, "is not within"),
            ("length", 1 << 40, "is not within"),
            ("length", 10, "needs 64 bytes; 10 are stored"),
            ("length", -10, "needs 64 bytes; -10 are stored"),
            ("length", None, "is not within"),
            ("transform_descriptors", ["zstd"], "is compressed or transformed"),
        ],
    )
    def test_no_place_of_a_file(self, folder, field, value, word):
        (folder.parent.parent / "outside.distcp").write_bytes(bytes(10000))
        (folder / "link.distcp").symlink_to(folder.parent.parent / "outside.distcp")

        def edit(entries, places):
            index, info = place(places, NORM)
            places[index] = dataclasses.replace(info, **{field: value})

        change(folder, edit)
        assert NORM in str(refused(folder, word))

    def test_links_may_lead_out_if_the_user_says_so(self, folder):
        name = "__0_0.distcp"
        (folder / name).rename(folder.parent.parent / name)
        (folder / name).symlink_to(folder.parent.parent / name)
        refused(folder, "is a link out of the folder", "--follow-links")
        TorchDistCheckpoint(folder, follow_links=True).hugging_face_tensors()

    def test_one_place_for_two(self, folder):
        def edit(entries, places):
            infos = {index: info for index, info in places.items() if index.fqn == KV_UP}
            first, second = list(infos)[:2]
            places[first] = dataclasses.replace(infos[second], offset=infos[second].offset + 1)

        change(folder, edit)
        refused(folder, "are in the same place of", KV_UP)

    def test_all_problems_at_once(self, folder):
        def edit(entries, places):
            for name in (NORM, FC1, KV_UP):
                index, info = place(places, name)
                places[index] = dataclasses.replace(info, offset=-1)

        change(folder, edit)
        assert len(refused(folder, NORM, FC1, KV_UP).problems) == 3


def with_chunk(function):
    """Change a tensor's first chunk."""

    def edit(entries, places):
        chunk = entries[KV_UP].chunks[0]
        index, info = next(
            (i, p) for i, p in places.items() if (i.fqn, i.offset) == (KV_UP, chunk.offsets)
        )
        del places[index]
        offsets, sizes = function(list(chunk.offsets), list(chunk.sizes))
        entries[KV_UP].chunks[0] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        places[MetadataIndex(KV_UP, offsets)] = info

    return edit


class TestChunks:
    @pytest.mark.parametrize(
        "function",
        {
            "overlapping": lambda offsets, sizes: (offsets, [1, sizes[1] + 1, sizes[2]]),
            "a hole": lambda offsets, sizes: (offsets, [1, sizes[1] - 1, sizes[2]]),
            "out of range": lambda offsets, sizes: ([7, *offsets[1:]], sizes),
            "in the place of another": lambda offsets, sizes: ([0, 4, 0], sizes),
            "other dims": lambda offsets, sizes: (offsets[:2], sizes[:2]),
            "empty": lambda offsets, sizes: (offsets, [1, 0, sizes[2]]),
        }.values(),
        ids=["overlapping", "hole", "out of range", "twice", "dims", "empty"],
    )
    def test_no_tiling(self, folder, function):
        change(folder, with_chunk(function))
        refused(folder, f"{KV_UP} of shape (3, 128, 24) is not tiled by its 96 chunks")

    @pytest.mark.parametrize(
        "function",
        [
            lambda offsets, sizes: ([-1, *offsets[1:]], sizes),
            lambda offsets, sizes: (offsets, [1 << 60, *sizes[1:]]),
        ],
    )
    def test_impossible_numbers(self, folder, function):
        change(folder, with_chunk(function))
        refused(folder, f"{KV_UP} has no shape, dtype or chunks")

    @pytest.mark.parametrize("starts", [(0, 8), (8, 16), (0, 0), (0,), (0, 16, 32)])
    def test_chunks_of_one_size(self, folder, starts):
        """They hold some values twice, or not at all, or more than there are."""

        def edit(entries, places):
            index, info = place(places, NORM)
            del places[index]
            size = torch.Size([16])
            boxes = [ChunkStorageMetadata(torch.Size([start]), size) for start in starts]
            entries[NORM].chunks[:] = boxes
            places.update({MetadataIndex(NORM, (start,)): info for start in starts})

        change(folder, edit)
        refused(folder, f"{NORM} of shape (32,) is not tiled by its {len(starts)} chunks")

    def test_one_is_missing(self, folder):
        change(folder, lambda entries, places: entries[KV_UP].chunks.pop())
        refused(folder, "is not tiled by its 95 chunks")

    def test_one_is_not_stored(self, folder):
        change(folder, lambda entries, places: places.pop(place(places, KV_UP)[0]))
        refused(folder, f"{KV_UP} at (0, 0, 0) is not stored")

    @pytest.mark.parametrize(
        "fields", [{"size": [3]}, {"properties": None}, {"chunks": None}, {"chunks": [None]}]
    )
    def test_fields_of_other_types(self, folder, fields):
        def edit(entries, places):
            entries[NORM] = dataclasses.replace(entries[NORM], **fields)

        change(folder, edit)
        refused(folder, f"{NORM} has no shape, dtype or chunks")


class TestEntries:
    def test_stored_but_not_described(self, folder):
        change(folder, lambda entries, places: entries.pop(NORM))
        refused(folder, f"{NORM} is stored, but not described")

    def test_neither_tensor_nor_object(self, folder):
        change(folder, lambda entries, places: entries.update({NORM: None}))
        refused(folder, f"{NORM} is neither a tensor nor an object")

    @pytest.mark.parametrize("name", ["a\x1b[2J", "a" * 1000, ""])
    def test_names_that_cannot_be_shown(self, folder, name):
        change(folder, lambda entries, places: entries.update({name: BytesStorageMetadata()}))
        error = refused(folder, "is no tensor's name")
        assert "\x1b" not in str(error)

    def test_other_numbers_of_layers(self, folder):
        """Before anything is made for each of them."""

        def edit(entries, places):
            (_, info) = place(places, NORM)
            size = torch.Size([1 << 39, 1])
            entry = dataclasses.replace(
                entries[NORM], size=size, chunks=[ChunkStorageMetadata(torch.Size([0, 0]), size)]
            )
            entry.properties.dtype = torch.int8
            entries["decoder.layers.x"] = entry
            places[MetadataIndex("decoder.layers.x", (0, 0))] = info

        change(folder, edit)
        refused(folder, "decoder.layers.x at (0, 0) needs 549755813888 bytes")

    def test_layers_of_another_model(self, folder):
        path = folder / "hugging_face/config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"num_hidden_layers": 2, "first_k_dense_replace": 2}))
        refused(folder, f"{KV_UP} has shape (3, 128, 24); for the model's layers", "(2,)")

    def test_a_tensor_of_nothing(self, folder):
        def edit(entries, places):
            size = torch.Size([0])
            entries["x"] = dataclasses.replace(
                entries[NORM], size=size, chunks=[ChunkStorageMetadata(size, size)]
            )
            places[MetadataIndex("x", (0,))] = place(places, NORM)[1]

        change(folder, edit)
        refused(folder, "x of shape (0,) is not tiled by its 1 chunks")


def replace_values(folder, content):
    """Put other bytes where the values of the final norm are."""
    data = content
    if not isinstance(content, bytes):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getvalue()
    (folder / "other.distcp").write_bytes(b"x" * 7 + data)

    def edit(entries, places):
        index, _ = place(places, NORM)
        places[index] = _StorageInfo("other.distcp", 7, len(data))

    change(folder, edit)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch owned",)


def deflated(tensor):
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    result = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return result.getvalue()


ONES = torch.ones(32, dtype=torch.bfloat16)
WRONG_VALUES = {
    "another shape": (ONES[:31], "holds torch.bfloat16 of shape (31,)"),
    "another dtype": (ONES.float(), "holds torch.float32 of shape (32,)"),
    "no tensor": ([ONES], "holds no tensor"),
    "a repeated value": (ONES[:1].clone().expand(32), "in a storage of"),
    "sparse": (ONES.to_sparse(), "_rebuild_sparse_tensor"),
    "a call": (Bomb(), "system, which is refused"),
    "compressed": (deflated(ONES), "has compressed records"),
    "nothing": (bytes(500), "is not in torch.save's zip format"),
    "half of it": (deflated(ONES)[:400], "cannot be read"),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values(folder, name, monkeypatch, tmp_path):
    """Seen when they are read, before anything is made of them."""
    monkeypatch.chdir(tmp_path)
    content, word = WRONG_VALUES[name]
    replace_values(folder, content)
    stored = TorchDistCheckpoint(folder).stored[NORM]
    with pytest.raises(CheckpointError, match=NORM) as caught, ReadSession() as session:
        stored.load(session)
    assert word in str(caught.value)
    assert "other.distcp at 7" in str(caught.value)
    assert not (tmp_path / "owned").exists()


def test_values_in_another_order_of_dims(folder):
    """torch.save keeps strides; they mean the same values."""
    stored = TorchDistCheckpoint(folder).stored["output_layer.weight"]
    with ReadSession() as session:
        values = stored.load(session).clone()
    data = io.BytesIO()
    torch.save(values.t().contiguous().t(), data)
    (folder / "other.distcp").write_bytes(data.getvalue())

    def edit(entries, places):
        index, _ = place(places, "output_layer.weight")
        places[index] = _StorageInfo("other.distcp", 0, len(data.getvalue()))

    change(folder, edit)
    stored = TorchDistCheckpoint(folder).stored["output_layer.weight"]
    with ReadSession() as session:
        assert torch.equal(stored.load(session), values)
        assert torch.equal(stored.narrow(1, 3, 4).load(session), values[:, 3:7])


class TestFolder:
    def test_no_backend_file(self, folder):
        (folder / "metadata.json").unlink()
        refused(folder, "has no metadata.json")

    @pytest.mark.parametrize("text", ['{"sharded_backend": "zarr"}', "[]", "{", "\xff"])
    def test_another_backend(self, folder, text):
        (folder / "metadata.json").write_text(text)
        refused(folder, "metadata.json")

    def test_no_metadata(self, folder):
        (folder / ".metadata").unlink()
        assert kind_of(folder) is None
        refused(folder, ".metadata")

    def test_the_iteration_is_a_link(self, folder):
        folder.rename(folder.parent.parent / "outside")
        folder.symlink_to(folder.parent.parent / "outside")
        refused(folder.parent, "is a link out of the folder")
        checkpoint = TorchDistCheckpoint(folder.parent, follow_links=True)
        checkpoint.hugging_face_tensors()

    def test_metadata_outside(self, folder):
        (folder / ".metadata").rename(folder.parent.parent / "outside")
        (folder / ".metadata").symlink_to(folder.parent.parent / "outside")
        refused(folder, "is a link out of the folder")

    def test_nothing_says_what_the_model_is(self, folder):
        def edit(entries, places):
            for collection in (entries, places):
                for key in [k for k in collection if "common_state" in str(k)]:
                    del collection[key]

        change(folder, edit)
        (folder / "common.pt").unlink()
        (folder / "hugging_face/config.json").unlink()
        refused(folder, "--hf-config")

    def test_files_are_missing(self, folder):
        """One line for each, not one for each tensor."""
        files = sorted(folder.glob("*.distcp"))
        for file in files[:2]:
            file.unlink()
        error = refused(folder, f"2 of the {len(files)} files", "incomplete", files[1].name)
        assert len(error.problems) == 2
        assert all("tensors" in problem for problem in error.problems)

    def test_the_common_state_is_something_else(self, folder):
        (folder / "hugging_face/config.json").unlink()
        for content, word in (
            ([1], "the common state is no dict"),
            (torch.zeros(4), "the common state is no dict"),
            ({"args": 3}, "--hf-config"),
        ):
            torch.save(content, folder / "common.pt")
            refused(folder, word)


def test_nothing_was_wrong_with_it(folder):
    """All of the above differ from this in one respect."""
    change(folder, lambda entries, places: None)
    config = tiny_config(first_k_dense_replace=3)
    found, expected = read_torch_dist(folder), random_tensors(config)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
