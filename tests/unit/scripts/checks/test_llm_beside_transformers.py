"""scripts/checks/llm_beside_transformers.py on a CPU: one small model, its rows and the table."""

import json
from dataclasses import replace

import pytest

from checks import llm_beside_transformers as check
from checks.llm_beside_transformers import MODELS, WAYS, Case, cases_of
from checks.tables import measured
from tests.support import needs, wide_models

SHAPE = "V3, 8 experts in 2, 1 taken, 2 of a token"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Its folder; ``LLM`` runs in this process, which is in a world already."""
    monkeypatch.setattr(wide_models, "WIDTHS", {**wide_models.WIDTHS, **wide_models.NARROW})
    monkeypatch.setattr(check, "NEW_TOKENS", 6)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return MODELS[SHAPE].write(tmp_path / "model")


@needs.no_gpu
def test_rows(model, tmp_path):
    rows = []
    for dtype, cached in (("bfloat16", True), ("float32", False)):
        case = Case(SHAPE, dtype, False, False, cached)
        rows += check.measure(case, model)
    assert [row["together"] for row in rows] == [False, True] * 2
    assert not any(row["exceeded"] for row in rows)
    generated = len(check.prompts()) * check.NEW_TOKENS
    whole = generated + sum(len(prompt) - 1 for prompt in check.prompts())
    assert [row["positions"] for row in rows] == [generated] * 2 + [whole] * 2
    bf16, fp32 = rows[0], rows[2]
    assert fp32["worst"] < 1e-4 < 1e-3 < bf16["worst"]
    assert fp32["same_choice"] == 1.0 and bf16["transformers_bf16"]["positions"] == whole
    assert measured.llm_table(tmp_path) == "Not measured yet."
    (tmp_path / "accuracy").mkdir()
    (tmp_path / measured.LLM_FILE).write_text(json.dumps({"rows": rows}))
    [line] = measured.llm_table(tmp_path).splitlines()[2:]
    cells = line.split(" | ")
    assert cells[0] == f"| {SHAPE}" and cells[2:5] == ["-"] * 3
    worst, rms = (max(row[name] for row in rows[:2]) for name in ("worst", "rms"))
    assert cells[1] == f"{worst:.1e} / {rms:.1e}"
    assert cells[-1].startswith(f"{max(row['worst'] for row in rows[2:]):.1e}")


def test_cases():
    """Every way on a GPU with TransformerEngine; what a CPU has, elsewhere."""
    everywhere = cases_of("V2", gpu=True, transformer_engine=True)
    assert len({case.name for case in everywhere}) == 2 ** len(WAYS) + 1
    assert len(cases_of("V2", gpu=True, transformer_engine=False)) == 4 + 1
    assert cases_of(SHAPE, gpu=True, transformer_engine=True) == [
        Case(SHAPE, "bfloat16", False, False, False),
        Case(SHAPE, "bfloat16", True, True, True),
    ]
    for name in MODELS:
        for case in cases_of(name, gpu=False, transformer_engine=True):
            assert not (case.graphs or case.transformer_engine)
            assert Case.of_name(case.name) == case


def test_a_row_beyond_the_bound(monkeypatch, capsys):
    """And a process that failed: both are named, and the exit code is 1."""
    case = Case("dense", "bfloat16", False, False, False)
    row = {
        **{name: getattr(case, name) for name in ("model", "dtype", *WAYS)},
        **dict.fromkeys(("worst", "rms", "median", "same_choice"), 0.5),
        "transformers_bf16": dict.fromkeys(("worst", "rms", "median"), 0.1),
        "together": True,
        "exceeded": "worst 0.5, transformers' in bf16 0.1",
    }
    found = [(case, [row]), (replace(case, graphs=True), "Traceback\nNo such kernel")]
    monkeypatch.setattr(check, "_results", lambda *_: found)
    assert check.main([]) == 1
    said = capsys.readouterr().err
    assert "2 cases or rows" in said and "No such kernel" in said
    assert "worst 0.5, transformers' in bf16 0.1" in said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--only", "llama"], "--only must match one of dense; V2;"),
        (["--case", "dense/fp8"], "--case must be MODEL/DTYPE with any of"),
        (["--model", "x"], "--model needs --case"),
    ],
)
def test_mistakes(words, error, capsys):
    assert check.main(words) == 2
    assert error in capsys.readouterr().err
