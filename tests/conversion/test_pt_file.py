"""Files of torch.save: opened without the values of tensors, which are read one at a time.

Then what is refused: calls, damage, and tensors that are not where they say.
"""

import argparse
import builtins
import codecs
import collections
import os
import pathlib
import random
import signal
import sys
import types
import zipfile

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.pickles import StandIn
from checkpoint_conversion.formats.pt_file import open_pt
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.pt_support import Calls, rebuilt, records, with_pickle, write_records
from tests.conversion.support import PeakMemory, refused

TABLE = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model_optim_rng.pt"


def opened(path, content):
    torch.save(content, path)
    return open_pt(path)


def loaded(path, tensor):
    """A tensor after saving and reading."""
    file = opened(path, {"x": tensor})
    with ReadSession() as session:
        return file.stored(file.content["x"]).lazy("x").load(session).clone()


@pytest.mark.parametrize(
    "tensor",
    [
        TABLE,
        TABLE.bfloat16(),
        TABLE.to(torch.float8_e4m3fn),
        TABLE.bool(),
        TABLE[1:, 2:],
        TABLE.t(),
        TABLE[:, 1:2],
        torch.zeros(0, 3),
        torch.tensor(3.5),
        torch.nn.Parameter(TABLE),
        # Mapped rather than copied, and not at the start of a page.
        torch.arange(400_000.0).reshape(400, 1000)[3:],
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_values_come_back(path, tensor):
    found = loaded(path, tensor)
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.float(), tensor.detach().float())


def test_tensors_that_share_a_storage(path):
    """Megatron's parameters are views of one buffer, which torch.save writes once."""
    file = opened(path, {"a": TABLE[0], "b": TABLE[1:], "c": TABLE[0]})
    stored = {name: file.stored(tensor) for name, tensor in file.content.items()}
    assert torch.equal(stored["a"].load(), TABLE[0])
    assert torch.equal(stored["b"].load(), TABLE[1:])
    assert stored["c"].offset == stored["a"].offset


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("source", [TABLE, torch.arange(800_000.0).reshape(800, 1000)])
def test_parts_are_read_alone(path, source, dim):
    file = opened(path, {"x": source})
    lazy = file.stored(file.content["x"]).lazy("x")
    part = lazy.narrow(dim, 1, 2).narrow(1 - dim, 2, 1)
    with ReadSession() as session:
        assert torch.equal(part.load(session), source.narrow(dim, 1, 2).narrow(1 - dim, 2, 1))
    assert part.leaves == {"x"}
    assert lazy.narrow(0, 1, 1).peak == lazy.nbytes // lazy.shape[0]


def test_what_megatron_saves_beside_tensors(path):
    """Plain values are there; what only a library could build is a stand-in without content."""
    content = {
        "args": argparse.Namespace(layers=3, dtype=torch.bfloat16, folder=pathlib.Path("a")),
        "rng_state": [{"numpy": np.random.get_state(), "python": random.getstate()}],
        "torch_rng_state": torch.get_rng_state(),
        "signal": signal.SIGTERM,
        "space": types.SimpleNamespace(a=1),
        "ordered": collections.OrderedDict(a=1),
        "bytes": b"abc",
        "set": {1},
    }
    found = opened(path, content).content
    assert found["args"].layers == 3
    assert found["args"].dtype == torch.bfloat16
    assert isinstance(found["args"].folder, StandIn)
    assert isinstance(found["signal"], StandIn)
    assert isinstance(found["rng_state"][0]["numpy"][1], StandIn)
    assert found["bytes"] == b"abc"
    assert found["ordered"] == {"a": 1}


def test_classes_of_absent_libraries(path, monkeypatch):
    """TransformerEngine need not be there to read what it left in a file."""
    module = types.ModuleType("transformer_engine.fp8")
    module.State = type("State", (), {"__module__": module.__name__})
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
        patched.setitem(sys.modules, "transformer_engine.fp8", module)
        torch.save({"x": module.State()}, path)
    found = open_pt(path).content["x"]
    assert isinstance(found, StandIn)
    assert found.path == "transformer_engine.fp8.State"


def test_what_others_allowed_is_not_built(path, monkeypatch):
    """Megatron allows torch.load to build some classes, for as long as the process lives."""
    monkeypatch.setattr("torch._weights_only_unpickler._marked_safe_globals_set", set())
    torch.serialization.add_safe_globals([pathlib.PosixPath])
    found = opened(path, {"x": pathlib.Path("a")}).content["x"]
    assert isinstance(found, StandIn)
    assert torch.serialization.get_safe_globals() == [pathlib.PosixPath]
    assert torch.load(path, weights_only=True) == {"x": pathlib.Path("a")}


def test_a_file_that_became_shorter(path):
    file = opened(path, {"x": TABLE})
    stored = file.stored(file.content["x"])
    os.truncate(path, stored.offset + 10)
    with refused("became shorter"):
        stored.load()


def test_a_file_larger_than_memory(path):
    """No more than a part of one tensor is mapped; torch.load(mmap=True) refuses such a file."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = 2 * memory // (1 << 30)
    with FakeTensorMode():
        content = {
            "large": torch.empty(rows, 1 << 29, dtype=torch.bfloat16),
            "small": torch.ones(3),
        }
    # A file of holes, which takes no space on the disk.
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content, path)
    growth = PeakMemory()
    found = open_pt(path)
    stored = found.stored(found.content["large"])
    with path.open("r+b") as file:
        file.seek(stored.offset + (rows - 1) * (1 << 30))
        file.write(torch.tensor([5.0], dtype=torch.bfloat16).view(torch.uint8).numpy())
    with ReadSession() as session:
        corner = stored.lazy("large").narrow(0, rows - 1, 1).narrow(1, 0, 4).load(session)
        assert corner.tolist() == [[5.0, 0.0, 0.0, 0.0]]
    assert found.stored(found.content["small"]).load().tolist() == [0.0, 0.0, 0.0]
    assert growth.growth < 16 << 20


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Calls(os.system, "touch {}"), "system"),
        (Calls(builtins.eval, "open('{}', 'w')"), "eval"),
        (Calls(os.mkdir, "{}"), "mkdir"),
        (Calls(torch.load, "{}"), "torch.serialization.load"),
        (Calls(builtins.getattr, "", "join"), "getattr"),
        (Calls(torch._utils._rebuild_sparse_tensor, None, ()), "_rebuild_sparse_tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "call",
)
def test_calls_are_refused_by_name_and_not_made(path, tmp_path, call, name):
    victim = tmp_path / "victim"
    function, arguments = call._call
    arguments = [a.format(victim) if isinstance(a, str) else a for a in arguments]
    torch.save({"model": {}, "x": Calls(function, *arguments)}, path)
    with refused("would need ", f"{name}, which is refused"):
        open_pt(path)
    assert not victim.exists()


def test_torchs_own_refusal_is_behind_ours(path, monkeypatch):
    """A name that slipped through would still not be called."""
    monkeypatch.setattr("checkpoint_conversion.formats.pt_file.check_globals", lambda pickled: [])
    torch.save({"x": Calls(os.system, "true")}, path)
    with refused("cannot be read: UnpicklingError"):
        open_pt(path)


def test_bytes_that_grow_are_refused(path):
    """Forty of these calls would fill any memory."""
    content = b"0" * 64
    for _ in range(3):
        content = Calls(codecs.encode, content, "HEX")
    torch.save({"x": content}, path)
    with refused("the codec hex"):
        open_pt(path)


def first_stored(path):
    file = open_pt(path)
    return file.stored(file.content["x"])


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (4, 4), (4, 1)),
        (9, (2, 2), (2, 1)),
        (0, (2, 2), (2**40, 1)),
        (0, (2**50,), (0,)),
        (0, (2**31, 2**31), (0, 0)),
        (2**60, (1,), (1,)),
        (0, (13,), (1,)),
        # No shapes at all.
        *((0, shape, (1,) * len(shape)) for shape in [(-1,), (2, -3), ("a",), (2.5,)]),
    ],
)
def test_tensors_beyond_their_storage(path, offset, shape, strides):
    torch.save({"x": rebuilt(TABLE, offset, shape, strides)}, path)
    with refused():
        first_stored(path)


def test_storages_of_another_size_than_their_record(path):
    """The size in the pickle and the size in the archive's directory must agree."""
    torch.save({"x": TABLE, "y": TABLE + 1}, path)
    with_pickle(path, lambda data: data.replace(b"K\x0ct", b"K\x0dt", 1))
    with refused():
        first_stored(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {k: v for k, v in c.items() if "data/0" not in k}, "cannot be read|no record"),
        (lambda c: c | {"other/data.pkl": b"."}, "not one of torch.save"),
        (lambda c: {k: v for k, v in c.items() if "data.pkl" not in k}, "not one of torch.save"),
        (lambda c: {k: b"big" if "byteorder" in k else v for k, v in c.items()}, "big-endian"),
        (lambda c: {k: v[:40] if "data.pkl" in k else v for k, v in c.items()}, "cannot be read"),
        (lambda c: c | {"archive/constants.pkl": b"."}, "TorchScript"),
    ],
    ids=["record", "two pickles", "no pickle", "byte order", "cut pickle", "TorchScript"],
)
def test_archives_that_are_refused(path, change, message):
    torch.save({"x": TABLE}, path)
    content = {f"archive/{k.partition('/')[2]}": v for k, v in records(path).items()}
    write_records(path, change(content))
    with pytest.raises(CheckpointError, match=message):
        first_stored(path)


def test_compressed_records(path):
    """A few kilobytes could pretend to be any number of gigabytes."""
    torch.save({"x": torch.zeros(1000, 1000)}, path)
    write_records(path, records(path), zipfile.ZIP_DEFLATED)
    with refused("compressed"):
        open_pt(path)


def test_a_damaged_pickle_is_noticed(path):
    """The archive has a checksum of it."""
    torch.save({"x": TABLE}, path)
    data = path.read_bytes()
    where = data.index(b"FloatStorage")
    path.write_bytes(data[:where] + b"Fl" + data[where + 2 :].replace(b"oat", b"oaT", 1))
    with refused("CRC"):
        open_pt(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x03\x04" + bytes(1000), b"\x80\x02."])
def test_files_that_are_something_else(path, content):
    path.write_bytes(content)
    with refused(str(path)):
        open_pt(path)


def test_files_of_old_torch(path):
    torch.save({"x": TABLE}, path, _use_new_zipfile_serialization=False)
    with refused("zip format", "torch 1.6"):
        open_pt(path)


def test_a_file_that_is_cut_off(path):
    torch.save({"x": torch.zeros(1000)}, path)
    data = path.read_bytes()
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with refused():
            open_pt(path)
