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
from tests.support.fake_packages import transformer_engine as fake_transformer_engine

PACKS = ["thd, 1 document", "thd, 2 documents", "thd, 5 documents"]


class _Scaled(torch.autograd.Function):
    """Its gradient is 1.3 times too large, as nothing in forward shows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.3 * grad


@pytest.fixture
def measured():
    """Rows of layers without TransformerEngine, on a CPU."""
    return lambda: list(
        check.measure_layers(TINY, 48, torch.bfloat16, "local", contextlib.nullcontext)
    )


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


def of(rows, implementation: str) -> dict[str, LayerRow]:
    return {row.layout: row for row in rows if row.implementation == implementation}


def test_layers_that_are_right(measured):
    rows = measured()
    for name in ("megatron", "ours"):
        found = of(rows, name)
        assert list(found) == ["sbhd", *PACKS]
        for row in found.values():
            assert not row.error and not row.out_of_bounds
            # Every tensor was compared, and none with itself.
            assert {"output", "input gradient", "linear_v_up_proj.weight"} < set(row.errors)
            assert all(1e-4 < x < 2e-2 for x in row.errors.values())
    assert of(rows, "ours")["sbhd"].ran
    refused = of(rows, "ours, transformer_engine").values()
    assert all("transformer_engine" in row.error and not row.errors for row in refused)


def test_a_wrong_gradient_of_packs_is_found(wrong_packs, measured):
    rows = measured()
    found = of(rows, "megatron")
    assert not found["sbhd"].out_of_bounds
    for layout in PACKS:
        assert found[layout].errors["linear_v_up_proj.weight"] == pytest.approx(0.3, abs=0.01)
        assert "input gradient" in found[layout].out_of_bounds
        assert "output" not in found[layout].out_of_bounds
    assert not any(row.out_of_bounds for row in of(rows, "ours").values())
    assert str(found["sbhd"]).startswith("megatron, sbhd: right (worst: ")
    assert str(found[PACKS[0]]).startswith("megatron, thd, 1 document: WRONG (worst: ")


@pytest.fixture
def fused(monkeypatch):
    return fake_transformer_engine.install(monkeypatch, cudnn=91400)


def test_widths(fused, monkeypatch):
    """Padded values in packs have wrong gradients here, as with cuDNN 9.14; nothing else has."""
    backward = fused.fused_attn_bwd

    def spoiled(*args, **kwargs):
        found = backward(*args, **kwargs)
        if kwargs["qkv_layout"] == "thd_thd_thd" and args[6].shape[-1] == 192:
            found[2] = found[2] * 1.2
        return found

    monkeypatch.setattr(fused, "fused_attn_bwd", spoiled)
    rows = list(check.measure_widths(2, 32, torch.device("cpu"), torch.bfloat16))
    assert len(rows) == 2 * len(check.WIDTHS) and not any(row.error for row in rows)
    for row in rows:
        wrong = row.layout == "thd" and row.value_width == 192
        assert (row.errors["dv"] > 0.1) == wrong
        assert row.errors["output"] < 1e-2 and row.errors["dq"] < 1e-2


def test_a_width_that_cannot_run_has_its_error(fused, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("cuDNN has no plan")

    monkeypatch.setattr(fused, "fused_attn_bwd", fails)
    rows = list(check.measure_widths(2, 32, torch.device("cpu"), torch.bfloat16))
    expected = "attention alone, widths 64/64, sbhd: RuntimeError: cuDNN has no plan"
    assert str(rows[0]) == expected
    assert all(row.error == "RuntimeError: cuDNN has no plan" for row in rows)


def row(implementation="ours", error="", **errors) -> LayerRow:
    bounds = dict.fromkeys(errors, 0.03)
    return LayerRow(implementation, "sbhd", "expanded, cudnn", errors, bounds, error)


@pytest.mark.parametrize(
    ("rows", "off"),
    [
        ([row(output=0.01), row("megatron", output=0.3)], False),
        ([row(output=0.01), row("ours, transformer_engine", "refused")], False),
        ([row(output=0.031)], True),
        ([row(output=float("inf"))], True),
        ([row(output=float("nan"))], True),
        ([row(output=0.01), row("ours, transformer_engine", output=0.2)], True),
        ([row(error="no")], True),
    ],
)
def test_when_ours_is_off(rows, off):
    assert check.ours_is_wrong(rows) is off


class TestCommand:
    @pytest.fixture
    def runs(self, monkeypatch, fused):
        """As on a GPU, whose work a CPU does."""
        monkeypatch.setattr(check, "_require_machine", lambda: "9.14.0")
        monkeypatch.setattr(check, "_environment", lambda: {"device": "a device"})
        monkeypatch.setattr(check, "_dimensions", lambda: TINY)
        monkeypatch.setattr(world, "start", lambda: None)
        monkeypatch.setattr(world, "stop", lambda: None)
        for name, value in {"WIDTHS": ((192, 128),), "TOKENS": 32, "HEADS": 2}.items():
            monkeypatch.setattr(check, name, value)
        small = partial(check.measure_layers, layers="local", only=contextlib.nullcontext)
        monkeypatch.setattr(check, "measure_layers", small)
        return lambda folder: check.main([str(folder)])

    def test_megatrons_fault_is_no_failure(self, runs, wrong_packs, tmp_path, capsys):
        assert runs(tmp_path / "new") == 0
        file = tmp_path / "new" / "packed_gradients-cudnn-9.14.0.json"
        found = json.loads(file.read_text())
        assert {row["implementation"] for row in found["layers"]} == {"megatron", *check.OURS}
        assert len(found["widths"]) == 2
        out = capsys.readouterr().out
        assert "megatron, sbhd: right" in out and "megatron, thd, 2 documents: WRONG" in out

    def test_ours_being_off_is(self, runs, monkeypatch, tmp_path):
        def off(self):
            return ["output"] if self.implementation == "ours" else []

        monkeypatch.setattr(LayerRow, "out_of_bounds", property(off))
        assert runs(tmp_path) == 1


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
