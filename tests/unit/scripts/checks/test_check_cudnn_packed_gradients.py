"""check_cudnn_packed_gradients.py without a GPU: what it finds, says and ends with."""

from __future__ import annotations

import contextlib
import json
import sys
from functools import partial

import pytest
import torch

from absorbed_mla import standard_mla
from checks import check_cudnn_packed_gradients as check
from checks.check_cudnn_packed_gradients import LayerRow
from tests.support import world
from tests.support.cases import TINY

PACKS = ["thd, 1 document", "thd, 2 documents", "thd, 5 documents"]
# Layers without TransformerEngine.
LOCAL = partial(check.measure_layers, layers="local", only=contextlib.nullcontext)


class _Scaled(torch.autograd.Function):
    """Its gradient is 1.3 times too large, as nothing in forward shows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.3 * grad


@pytest.fixture
def wrong_packs(monkeypatch):
    """Megatron's core attention has a wrong gradient of V in packs, and nowhere else."""
    forward = standard_mla.PlainCoreAttention.forward

    def spoiled(self, query, key, value, *args, packed_seq_params=None, **kwargs):
        if packed_seq_params is not None:
            value = _Scaled.apply(value)
        kwargs["packed_seq_params"] = packed_seq_params
        return forward(self, query, key, value, *args, **kwargs)

    monkeypatch.setattr(standard_mla.PlainCoreAttention, "forward", spoiled)


def measured() -> dict[str, dict[str, LayerRow]]:
    found: dict[str, dict[str, LayerRow]] = {}
    for row in LOCAL(TINY, 48, torch.bfloat16):
        found.setdefault(row.implementation, {})[row.layout] = row
    return found


def test_layers_that_are_right():
    found = measured()
    for name in ("megatron", "ours"):
        assert list(found[name]) == ["sbhd", *PACKS]
        for row in found[name].values():
            assert not row.error and not row.out_of_bounds
            # Every tensor was compared, and none with itself.
            assert {"output", "input gradient", "linear_v_up_proj.weight"} < set(row.errors)
            assert all(1e-4 < x < 2e-2 for x in row.errors.values())
    assert found["ours"]["sbhd"].ran
    refused = found["ours, transformer_engine"].values()
    assert all("transformer_engine" in row.error and not row.errors for row in refused)


def test_a_wrong_gradient_of_packs_is_found(wrong_packs):
    rows = measured()
    found = rows["megatron"]
    assert not found["sbhd"].out_of_bounds
    for layout in PACKS:
        assert found[layout].errors["linear_v_up_proj.weight"] == pytest.approx(0.3, abs=0.01)
        assert "input gradient" in found[layout].out_of_bounds
        assert "output" not in found[layout].out_of_bounds
    assert not any(row.out_of_bounds for row in rows["ours"].values())
    assert str(found["sbhd"]).startswith("megatron, sbhd: right (worst: ")
    assert str(found[PACKS[0]]).startswith("megatron, thd, 1 document: WRONG (worst: ")


def row(implementation="ours", error="", **errors) -> LayerRow:
    bounds = dict.fromkeys(errors, 0.03)
    return LayerRow(implementation, "sbhd", "expanded, cudnn", errors, bounds, error)


TE = "ours, transformer_engine"


@pytest.mark.parametrize(
    ("rows", "off"),
    [
        ([row(output=0.01), row("megatron", output=0.3)], False),
        ([row(output=0.01), row(TE, "refused")], False),
        ([row(output=0.031)], True),
        ([row(output=float("inf"))], True),
        ([row(output=float("nan"))], True),
        ([row(output=0.01), row(TE, output=0.2)], True),
        ([row(error="no")], True),
    ],
)
def test_when_ours_is_off(rows, off):
    assert check.ours_is_wrong(rows) is off


@pytest.mark.parametrize("off", [False, True])
def test_command(off, wrong_packs, monkeypatch, tmp_path, capsys):
    """As on a GPU, whose work a CPU does: Megatron's fault is no failure, ours being off is."""
    monkeypatch.setattr(check, "_require_machine", lambda: "9.14.0")
    monkeypatch.setattr(check, "_environment", lambda: {"device": "a device"})
    monkeypatch.setattr(check, "_dimensions", lambda: TINY)
    monkeypatch.setattr(world, "start", lambda: None)
    monkeypatch.setattr(world, "stop", lambda: None)
    monkeypatch.setattr(check, "TOKENS", 32)
    monkeypatch.setattr(check, "measure_layers", LOCAL)
    if off:
        found = property(lambda row: ["output"] if row.implementation == "ours" else [])
        monkeypatch.setattr(LayerRow, "out_of_bounds", found)
    assert check.main([str(tmp_path / "new")]) == off
    content = json.loads((tmp_path / "new" / "packed_gradients-cudnn-9.14.0.json").read_text())
    assert {row["implementation"] for row in content["layers"]} == {"megatron", *check.OURS}
    out = capsys.readouterr().out
    assert "megatron, sbhd: right" in out
    assert ("megatron, thd, 2 documents: WRONG" in out) is not off


@pytest.mark.parametrize(
    ("argv", "gpu", "message"),
    [
        ([], False, "needs a GPU that PyTorch can use"),
        ([], True, "needs TransformerEngine: not installed"),
        (["--tokens", "15"], True, "unrecognized arguments: --tokens 15"),
    ],
)
def test_refusals_are_one_line(argv, gpu, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    assert check.main(["out", *argv]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1 and message in captured.err
