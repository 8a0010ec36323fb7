"""scripts/benchmarks/drawing.py: a run on a CPU, with Triton's interpreter and without."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.drawing import DRAWS, DrawingBenchmark, DrawingReport
from tests.support.backends import triton_interpreter

with triton_interpreter():
    import absorbed_mla.testing.token_weights  # noqa: F401
    from absorbed_mla.kernels.sampling import draw

TINY = "--device cpu --requests 1,2 --vocab-size 600 --seconds-per-row 0.001"


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(capsys, *options: str, code: int = 0) -> list[dict]:
    assert DrawingBenchmark.main([*TINY.split(), *options]) == code
    [found] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found["rows"]


def test_without_triton(tmp_path, capsys):
    files = tmp_path / "drawing.json", tmp_path / "drawing.png"
    rows = run(capsys, "--json", str(files[0]), "--plot", str(files[1]))
    kinds = [(row["draws"], row["logits"], row["requests"]) for row in rows]
    assert kinds == [(d, k, n) for d in DRAWS for k in ("flat", "peaked") for n in (1, 2)]
    assert all(row["torch_us"] > 0 and "ours_us" not in row for row in rows)
    assert len(DrawingReport.read(files[0]).measured) == len(rows)
    assert files[1].stat().st_size > 1000


def test_ours_draw_what_pytorch_draws(capsys):
    with triton_interpreter():
        rows = run(capsys, "--draws", "greedy,top_p,min_p", "--logits", "peaked")
    assert len(rows) == 6
    for row in rows:
        assert row["ours_us"] > 0 and row["torch_us"] > 0, row
        assert row["ratio"] == pytest.approx(row["ours_us"] / row["torch_us"], rel=1e-12)
        assert row["equal"] == 1


@pytest.mark.parametrize("requests", [1, 2])
def test_other_tokens_are_an_error(capsys, monkeypatch, requests):
    """Also those of a request that depend on how many there are."""
    right = draw.draw_tokens

    def wrong(logits, numbers, *, filters):
        found = right(logits, numbers, filters=filters)
        found[-1] = 7 if len(found) == requests else found[-1]
        return found

    monkeypatch.setattr(draw, "draw_tokens", wrong)
    with triton_interpreter():
        rows = run(capsys, "--draws", "sampled", "--logits", "flat", code=1)
    assert [row["requests"] for row in rows if "error" in row] == [requests]
    [error] = [row["error"] for row in rows if "error" in row]
    wanted = f"1 of {requests} tokens are wrong: request {requests - 1} has 7 instead of "
    assert error.startswith(wanted)
