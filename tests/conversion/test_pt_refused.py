"""Files of torch.save that are refused: calls, damage, and tensors that are not where they say."""

from __future__ import annotations

import builtins
import codecs
import os
import zipfile

import pytest
import torch

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.pt_file import open_pt
from tests.conversion.pt_support import Calls, rebuilt, records, with_pickle, write_records

TABLE = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model_optim_rng.pt"


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
    with pytest.raises(CheckpointError, match=rf"would need \S*{name}, which is refused"):
        open_pt(path)
    assert not victim.exists()


def test_torchs_own_refusal_is_behind_ours(path, monkeypatch):
    """A name that slipped through would still not be called."""
    monkeypatch.setattr("checkpoint_conversion.formats.pt_file.check_globals", lambda pickled: [])
    torch.save({"x": Calls(os.system, "true")}, path)
    with pytest.raises(CheckpointError, match=r"cannot be read: UnpicklingError"):
        open_pt(path)


def test_bytes_that_grow_are_refused(path):
    """Forty of these calls would fill any memory."""
    content = b"0" * 64
    for _ in range(3):
        content = Calls(codecs.encode, content, "HEX")
    torch.save({"x": content}, path)
    with pytest.raises(CheckpointError, match="the codec hex"):
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
    with pytest.raises(CheckpointError):
        first_stored(path)


def test_storages_of_another_size_than_their_record(path):
    """The size in the pickle and the size in the archive's directory must agree."""
    torch.save({"x": TABLE, "y": TABLE + 1}, path)
    with_pickle(path, lambda data: data.replace(b"K\x0ct", b"K\x0dt", 1))
    with pytest.raises(CheckpointError):
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
    with pytest.raises(CheckpointError, match="compressed"):
        open_pt(path)


def test_a_damaged_pickle_is_noticed(path):
    """The archive has a checksum of it."""
    torch.save({"x": TABLE}, path)
    data = path.read_bytes()
    where = data.index(b"FloatStorage")
    path.write_bytes(data[:where] + b"Fl" + data[where + 2 :].replace(b"oat", b"oaT", 1))
    with pytest.raises(CheckpointError, match="CRC"):
        open_pt(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x03\x04" + bytes(1000), b"\x80\x02."])
def test_files_that_are_something_else(path, content):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(path)):
        open_pt(path)


def test_files_of_old_torch(path):
    torch.save({"x": TABLE}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"zip format.*torch 1\.6"):
        open_pt(path)


def test_a_file_that_is_cut_off(path):
    torch.save({"x": torch.zeros(1000)}, path)
    data = path.read_bytes()
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            open_pt(path)
