"""Distributed checkpoints that contradict themselves, or name what no checkpoint may name."""

import dataclasses
import io
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
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.pt_support import Calls, saved
from tests.conversion.support import (
    assert_same_tensors,
    change_json,
    random_tensors,
    read_torch_dist,
    refused,
    tiny_config,
    write_torch_dist,
)

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
    """A copy to change, beside a file that must not be read."""
    (tmp_path / "outside.distcp").write_bytes(bytes(10000))
    inner = Path(shutil.copytree(made, tmp_path / "made")) / "release"
    (inner / "link.distcp").symlink_to(tmp_path / "outside.distcp")
    return inner


def change(folder, function):
    """Change the metadata with ``function(entries, places)``."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    function(metadata.state_dict_metadata, metadata.storage_data)
    path.write_bytes(pickle.dumps(metadata))


def refuse(folder, *parts, problems=None):
    with refused(*parts, problems=problems):
        TorchDistCheckpoint(folder).hugging_face_tensors()


def place(places, name):
    """The first of a tensor's chunks: its index and where it is."""
    return next((index, info) for index, info in places.items() if index.fqn == name)


def with_place(name, **fields):
    """Changes where the first chunk of a tensor is."""

    def edit(entries, places):
        index, info = place(places, name)
        places[index] = dataclasses.replace(info, **fields)

    return edit


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
def test_places_outside_a_file(folder, field, value, word):
    change(folder, with_place(NORM, **{field: value}))
    refuse(folder, word, NORM)


def with_chunk(function):
    """Changes offsets and sizes of a tensor's first chunk."""

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


def with_chunks_at(*starts):
    """Gives a tensor of 32 values chunks of 16."""

    def edit(entries, places):
        index, info = place(places, NORM)
        del places[index]
        size = torch.Size([16])
        entries[NORM].chunks[:] = [ChunkStorageMetadata(torch.Size([at]), size) for at in starts]
        places.update({MetadataIndex(NORM, (start,)): info for start in starts})

    return edit


def with_entry(**fields):
    """Changes what is said of a tensor."""
    return lambda entries, places: entries.update(
        {NORM: dataclasses.replace(entries[NORM], **fields)}
    )


def in_one_place(entries, places):
    """Lets two chunks overlap in their file."""
    infos = {index: info for index, info in places.items() if index.fqn == KV_UP}
    first, second = list(infos)[:2]
    places[first] = dataclasses.replace(infos[second], offset=infos[second].offset + 1)


def with_many_layers(entries, places):
    """Claims more layers than memory could hold a name for."""
    size = torch.Size([1 << 39, 1])
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), size)]
    entry = dataclasses.replace(entries[NORM], size=size, chunks=chunks)
    entry.properties.dtype = torch.int8
    entries["decoder.layers.x"] = entry
    places[MetadataIndex("decoder.layers.x", (0, 0))] = place(places, NORM)[1]


def with_nothing(entries, places):
    """Adds a tensor without values."""
    size = torch.Size([0])
    chunks = [ChunkStorageMetadata(size, size)]
    entries["x"] = dataclasses.replace(entries[NORM], size=size, chunks=chunks)
    places[MetadataIndex("x", (0,))] = place(places, NORM)[1]


NO_TILING = f"{KV_UP} of shape (3, 128, 24) is not tiled by its 96 chunks"
NO_BOX = f"{KV_UP} has no shape, dtype or chunks"
NO_FIELDS = f"{NORM} has no shape, dtype or chunks"
EDITS = {
    "two in one place": (in_one_place, "are in the same place of"),
    "overlapping": (with_chunk(lambda at, size: (at, [1, size[1] + 1, size[2]])), NO_TILING),
    "hole": (with_chunk(lambda at, size: (at, [1, size[1] - 1, size[2]])), NO_TILING),
    "out of range": (with_chunk(lambda at, size: ([7, *at[1:]], size)), NO_TILING),
    "same offset twice": (with_chunk(lambda at, size: ([0, 4, 0], size)), NO_TILING),
    "fewer dims": (with_chunk(lambda at, size: (at[:2], size[:2])), NO_TILING),
    "empty chunk": (with_chunk(lambda at, size: (at, [1, 0, size[2]])), NO_TILING),
    "negative offset": (with_chunk(lambda at, size: ([-1, *at[1:]], size)), NO_BOX),
    "absurd size": (with_chunk(lambda at, size: (at, [1 << 60, *size[1:]])), NO_BOX),
    **{
        f"chunks at {starts}": (
            with_chunks_at(*starts),
            f"{NORM} of shape (32,) is not tiled by its {len(starts)} chunks",
        )
        for starts in [(0, 8), (8, 16), (0, 0), (0,), (0, 16, 32)]
    },
    "chunk missing": (lambda entries, _: entries[KV_UP].chunks.pop(), "is not tiled by its 95 chu"),
    "chunk not stored": (
        lambda _, places: places.pop(place(places, KV_UP)[0]),
        f"{KV_UP} at (0, 0, 0) is not stored",
    ),
    "size of another type": (with_entry(size=[3]), NO_FIELDS),
    "no properties": (with_entry(properties=None), NO_FIELDS),
    "no chunks": (with_entry(chunks=None), NO_FIELDS),
    "chunk of another type": (with_entry(chunks=[None]), NO_FIELDS),
    "not described": (lambda entries, _: entries.pop(NORM), f"{NORM} is stored, but not descri"),
    "neither tensor nor object": (
        lambda entries, _: entries.update({NORM: None}),
        f"{NORM} is neither a tensor nor an object",
    ),
    **{
        f"name {name[:8]!r}": (
            lambda entries, _, name=name: entries.update({name: BytesStorageMetadata()}),
            "is no tensor's name",
        )
        for name in ["a\x1b[2J", "a" * 1000, ""]
    },
    "absurd number of layers": (with_many_layers, "layers.x at (0, 0) needs 549755813888 bytes"),
    "no values": (with_nothing, "x of shape (0,) is not tiled by its 1 chunks"),
}


@pytest.mark.parametrize("name", EDITS)
def test_metadata_that_contradict_themselves(folder, name):
    edit, word = EDITS[name]
    change(folder, edit)
    with refused(word) as caught:
        TorchDistCheckpoint(folder).hugging_face_tensors()
    assert "\x1b" not in str(caught.value)


def test_all_problems_at_once(folder):
    for name in (NORM, FC1, KV_UP):
        change(folder, with_place(name, offset=-1))
    refuse(folder, NORM, FC1, KV_UP, problems=3)


def test_layers_of_another_model(folder):
    config = folder / "hugging_face/config.json"
    change_json(config, num_hidden_layers=2, first_k_dense_replace=2)
    refuse(folder, f"{KV_UP} has shape (3, 128, 24); for the model's layers", "(2,)")


def replace_values(folder, name, content):
    """Put other bytes where the values of a tensor are."""
    (folder / "other.distcp").write_bytes(b"x" * 7 + content)

    def edit(entries, places):
        index, _ = place(places, name)
        places[index] = _StorageInfo("other.distcp", 7, len(content))

    change(folder, edit)


def deflated(tensor):
    result = io.BytesIO()
    old = zipfile.ZipFile(io.BytesIO(saved(tensor)))
    with old, zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return result.getvalue()


ONES = torch.ones(32, dtype=torch.bfloat16)
WRONG_VALUES = {
    "another shape": (saved(ONES[:31]), "holds torch.bfloat16 of shape (31,)"),
    "another dtype": (saved(ONES.float()), "holds torch.float32 of shape (32,)"),
    "no tensor": (saved([ONES]), "holds no tensor"),
    "a repeated value": (saved(ONES[:1].clone().expand(32)), "in a storage of"),
    "sparse": (saved(ONES.to_sparse()), "_rebuild_sparse_tensor"),
    "a call": (saved(Calls(os.system, "touch owned")), "system, which is refused"),
    "compressed": (deflated(ONES), "has compressed records"),
    "nothing": (bytes(500), "is not in torch.save's zip format"),
    "half of it": (deflated(ONES)[:400], "cannot be read"),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values(folder, name, monkeypatch, tmp_path):
    """Seen when they are read, before anything is made of them."""
    monkeypatch.chdir(tmp_path)
    content, word = WRONG_VALUES[name]
    replace_values(folder, NORM, content)
    stored = TorchDistCheckpoint(folder).stored[NORM]
    with refused(NORM, word, "other.distcp at 7"), ReadSession() as session:
        stored.load(session)
    assert not (tmp_path / "owned").exists()


def test_values_in_another_order_of_dims(folder):
    """torch.save keeps strides; they mean the same values."""
    name = "output_layer.weight"
    with ReadSession() as session:
        values = TorchDistCheckpoint(folder).stored[name].load(session).clone()
    replace_values(folder, name, saved(values.t().contiguous().t()))
    stored = TorchDistCheckpoint(folder).stored[name]
    with ReadSession() as session:
        assert torch.equal(stored.load(session), values)
        assert torch.equal(stored.narrow(1, 3, 4).load(session), values[:, 3:7])


class TestFolder:
    def test_no_backend_file(self, folder):
        (folder / "metadata.json").unlink()
        refuse(folder, "has no metadata.json")

    @pytest.mark.parametrize("text", ['{"sharded_backend": "zarr"}', "[]", "{", "\xff"])
    def test_another_backend(self, folder, text):
        (folder / "metadata.json").write_text(text)
        refuse(folder, "metadata.json")

    def test_no_metadata(self, folder):
        (folder / ".metadata").unlink()
        assert kind_of(folder) is None
        refuse(folder, ".metadata")

    def test_nothing_says_what_the_model_is(self, folder):
        def edit(entries, places):
            for collection in (entries, places):
                for key in [k for k in collection if "common_state" in str(k)]:
                    del collection[key]

        change(folder, edit)
        (folder / "common.pt").unlink()
        (folder / "hugging_face/config.json").unlink()
        refuse(folder, "--hf-config")

    def test_files_are_missing(self, folder):
        """One line for each, not one for each tensor."""
        (folder / "link.distcp").unlink()
        files = sorted(folder.glob("*.distcp"))
        for file in files[:2]:
            file.unlink()
        words = (f"2 of the {len(files)} files", "incomplete", files[1].name, "with values of ")
        refuse(folder, *words, problems=2)

    def test_the_common_state_is_something_else(self, folder):
        (folder / "hugging_face/config.json").unlink()
        for content, word in (
            ([1], "the common state is no dict"),
            (torch.zeros(4), "the common state is no dict"),
            ({"args": 3}, "--hf-config"),
        ):
            torch.save(content, folder / "common.pt")
            refuse(folder, word)


def test_nothing_was_wrong_with_it(folder):
    """All of the above differ from this in one respect."""
    change(folder, lambda entries, places: None)
    expected = random_tensors(tiny_config(first_k_dense_replace=3))
    assert_same_tensors(read_torch_dist(folder), expected)
