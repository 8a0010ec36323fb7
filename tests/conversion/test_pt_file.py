"""Files of torch.save: read without their values, and written tensor by tensor."""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import random
import signal
import sys
import types

import numpy as np
import pytest
import torch

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.pt_file import open_pt
from checkpoint_conversion.formats.pt_globals import StandIn
from checkpoint_conversion.formats.pt_writer import reserve, write_values
from checkpoint_conversion.lazy_tensor import ReadSession, zeros
from tests.conversion.peak_memory import PeakMemory
from tests.conversion.support import in_memory

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
    with pytest.raises(CheckpointError, match="became shorter"):
        stored.load()


def test_a_file_larger_than_memory(path):
    """Neither writing nor reading it maps more than one tensor."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = 2 * memory // (1 << 30)
    shapes = {"large": zeros((rows, 1 << 29), torch.bfloat16), "small": zeros((3,), torch.float32)}
    places = reserve(path, shapes, lambda empty: {"args": None, **empty})
    with path.open("r+b") as file:
        write_values(file.fileno(), torch.tensor([1.0, 2.0, 3.0]), places["small"])
        last_row = places["large"] + (rows - 1) * (1 << 30)
        write_values(file.fileno(), torch.tensor([5.0], dtype=torch.bfloat16), last_row)
    memory = PeakMemory()
    found = open_pt(path)
    large = found.stored(found.content["large"]).lazy("large")
    with ReadSession() as session:
        corner = large.narrow(0, rows - 1, 1).narrow(1, 0, 4).load(session)
        assert corner.tolist() == [[5.0, 0.0, 0.0, 0.0]]
    assert found.stored(found.content["small"]).load().tolist() == [1.0, 2.0, 3.0]
    assert memory.growth < 16 << 20


@pytest.mark.parametrize("at_once", [1 << 26, 5])
def test_room_is_made_in_the_order_of_the_content(path, monkeypatch, at_once):
    """Each value has to get to the place of its own name, however few bytes a write takes."""
    monkeypatch.setattr("checkpoint_conversion.formats.pt_writer._WRITE", at_once)
    tensors = in_memory(
        {
            "b": TABLE.bfloat16(),
            "none": torch.zeros(0, 4),
            "a": torch.arange(5.0),
            "half": torch.ones(3).half(),
            "last": torch.tensor([7.0], dtype=torch.float64),
        }
    )
    places = reserve(path, tensors, lambda empty: {"model": empty})
    with path.open("r+b") as file, ReadSession() as session:
        for name, place in places.items():
            write_values(file.fileno(), tensors[name].load(session), place)
    for mmap in (False, True):
        model = torch.load(path, weights_only=True, mmap=mmap)["model"]
        assert list(model) == list(tensors)
        with ReadSession() as session:
            for name, tensor in tensors.items():
                assert torch.equal(model[name], tensor.load(session)), name
                assert model[name].dtype == tensor.dtype, name
