"""Reading .metadata: what torch and Megatron write, and nothing else."""

import collections
import copyreg
import os
import pickle
from pathlib import PosixPath

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from checkpoint_conversion.formats.pickles import load_metadata
from tests.conversion.pt_support import Calls
from tests.conversion.support import refused


@pytest.fixture
def path(tmp_path):
    return tmp_path / ".metadata"


def example():
    """All classes that there are in the metadata of real checkpoints."""
    size = torch.Size([4, 2])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    properties = TensorProperties(torch.bfloat16)
    metadata = Metadata(
        {
            "weight": TensorStorageMetadata(properties, size, [chunk]),
            "state/shard_0_1": BytesStorageMetadata(),
        },
        planner_data=collections.OrderedDict(weight=("model", "weight", 0)),
        storage_data={
            MetadataIndex("weight", torch.Size([0, 0]), 3): _StorageInfo("__0_0.distcp", 0, 99),
            MetadataIndex("state/shard_0_1"): _StorageInfo("__0_0.distcp", 99, 9, ["zstd"]),
        },
        storage_meta=StorageMeta(PosixPath("/somewhere/else"), "a", "b", ["c"]),
    )
    item = WriteItem(
        MetadataIndex("weight", torch.Size([0, 0])),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, size),
    )
    other = WriteItem(
        MetadataIndex("state"), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(9)
    )
    metadata.all_local_plans = [SavePlan([item, other])]
    return metadata


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_all_that_checkpoints_have(path, protocol):
    metadata = example()
    path.write_bytes(pickle.dumps(metadata, protocol))
    found = load_metadata(path)
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.storage_data == metadata.storage_data
    assert [index.index for index in found.storage_data] == [3, None]
    assert found.planner_data == metadata.planner_data
    assert str(found.storage_meta.checkpoint_id) == "/somewhere/else"
    assert found.all_local_plans == metadata.all_local_plans


def test_dtypes(path):
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    entries = {
        name: TensorStorageMetadata(TensorProperties(dtype), torch.Size([]), [])
        for name, dtype in dtypes.items()
    }
    path.write_bytes(pickle.dumps(Metadata(entries)))
    found = load_metadata(path).state_dict_metadata
    assert {name: entry.properties.dtype for name, entry in found.items()} == dtypes


def test_classes_that_megatron_had(path):
    """Under names that only Megatron could import."""
    module = "megatron.core.dist_checkpointing.strategies.torch"
    data = pickle.dumps(example(), 2)
    for own, former in (
        ("torch.distributed.checkpoint.metadata\nMetadata\n", f"{module}\nMCoreMetadata\n"),
        ("torch.distributed.checkpoint.planner\nSavePlan\n", f"{module}\nMCoreSavePlan\n"),
    ):
        assert data.count(own.encode()) == 1
        data = data.replace(own.encode(), former.encode())
    path.write_bytes(data)
    assert load_metadata(path).state_dict_metadata == example().state_dict_metadata


REFUSED = {
    "os.system": (Calls(os.system, "touch owned"), "system, which is refused"),
    "eval": (Calls(eval, "1"), "builtins.eval, which is refused"),
    "getattr": (Calls(getattr, "x", "join"), "builtins.getattr, which is refused"),
    "torch.load": (Calls(torch.load, "x"), "torch.serialization.load, which is refused"),
    "reconstructor": (Calls(copyreg._reconstructor, Metadata, object, None), "copyreg"),
    "a submodule": (Calls(torch.nn.Linear, 1, 1), "torch.nn"),
    "a set": ({1, 2}, "damaged"),
    "bytes": (b"1234", "damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else(path, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    value, why = REFUSED[name]
    metadata = example()
    metadata.planner_data = {"x": value}
    path.write_bytes(pickle.dumps(metadata))
    with refused(why, str(path)):
        load_metadata(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [".metadata"]


def stream(*parts):
    """A pickle of protocol 4, put together by hand."""
    return b"\x80\x04" + b"".join(parts) + b"."


def named(module, name):
    return f"c{module}\n{name}\n".encode()


# Each is (()), ((), ()), (((), ()), ((), ())), ...: 2 ** 64 entries in all.
DOUBLING = b")" + b"\x94h\x00\x86" + b"".join(b"\x94h%c\x86" % (i + 1) for i in range(63))
META = "torch.distributed.checkpoint.metadata"
TRICKS = {
    "key that is hashed for ever": stream(b"}", DOUBLING, b"Ns"),
    **{
        f"{name} of what is hashed for ever": stream(
            DOUBLING, b"\x94", named(module, name), b"h\x40\x85R"
        )
        for module, name in (
            (META, "_MEM_FORMAT_ENCODING"),
            ("torch.serialization", "_get_layout"),
        )
    },
    "ordered dict of what is hashed for ever": stream(
        DOUBLING, b"\x94", named("collections", "OrderedDict"), b"]]h\x40aNaa\x85R"
    ),
    "index beyond any memory": stream(b"}r\xff\xff\xff\xff"),
    "class with other methods": stream(named(META, "MetadataIndex"), b"N}\x8c\x08__hash__Ns\x86b"),
    "class with other fields": stream(named(META, "Metadata"), b"}\x8c\x07versionK\x01sb"),
    "call of a dtype": stream(named("torch", "float32"), b")R"),
    "call of a class that is only filled": stream(named(META, "Metadata"), b"\x8c\x01x\x85R"),
    "record of something that is none": stream(named("torch", "Size"), b")\x81"),
    "text as a long number": stream(b"L" + b"9" * 10000 + b"L\n"),
    "huge text": stream(b"\x8d" + (1 << 62).to_bytes(8, "little") + b"a"),
    "old instance": stream(b"(ios\nsystem\n"),
    "persistent id": stream(b"Pid\n"),
    "extension": stream(b"\x82\x01"),
    "nested without end": stream(b"]" * 100000 + b"a" * 99999),
    "no metadata": stream(b"}"),
    "a class": stream(named(META, "Metadata")),
    "end in the middle": stream(b"}")[:-1],
    "nothing": b"",
    "something else": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("name", TRICKS)
def test_tricks(path, name):
    before = {cls: dict(vars(cls)) for cls in (Metadata, MetadataIndex)}
    path.write_bytes(TRICKS[name])
    with refused(str(path)) as caught:
        load_metadata(path)
    assert len(str(caught.value)) < 500
    assert {cls: dict(vars(cls)) for cls in before} == before


def test_a_file_that_is_not_there_or_beyond_any_size(path):
    with refused("No such file"):
        load_metadata(path)
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)
    with refused("larger than"):
        load_metadata(path)
