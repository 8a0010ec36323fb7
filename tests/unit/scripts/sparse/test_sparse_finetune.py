"""scripts/sparse_finetune.py: all stages in a small size, its table and its refusals."""

import json
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch

from sparse.entry import main
from sparse.plot import table
from sparse.stages import stages
from training import megatron_loop

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 on the CPU")
SMALL = {
    "--dense-iters": 12,
    "--warmup-iters": 8,
    "--sparse-iters": 4,
    "--interval": 4,
    "--seq-length": 48,
    "--topk": 6,
    "--batch-size": 2,
    "--eval-iters": 1,
}
WORDS = [str(word) for pair in SMALL.items() for word in pair]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("example") / "a folder"
    with mock.patch.object(megatron_loop, "finish", lambda: None):
        assert main(["--output", str(folder), *WORDS]) == 0
    return folder


@pytest.fixture(scope="module")
def result(folder) -> dict:
    return json.loads((folder / "recall.json").read_text())


def rows(result: dict, stage: str) -> dict[int, dict]:
    return {row["iteration"]: row for row in result["rows"] if row["stage"] == stage}


def test_every_checkpoint_is_measured(result):
    found = {stage: list(rows(result, stage)) for stage in ("warm-up", "sparse", "continued")}
    assert found == {"warm-up": [0, 4, 8], "sparse": [0, 4], "continued": [0, 4]}


def test_the_indexer_learns_what_the_attention_prefers(result):
    warm = rows(result, "warm-up")
    assert warm[8]["recall_in_dense"] > warm[0]["recall_in_dense"] + 0.02
    assert 0.15 < warm[0]["by_chance"] < 0.5
    losses = result["indexer_loss"]["warm-up"]
    assert losses["8"] < losses["1"]


def test_stages_begin_where_others_ended(result):
    warm, sparse, dense = (rows(result, name) for name in ("warm-up", "sparse", "continued"))
    for key in ("dense_loss", "sparse_loss", "recall_in_sparse"):
        assert sparse[0][key] == warm[8][key]
    # The warm-up leaves the model alone.
    assert {row["dense_loss"] for row in warm.values()} == {dense[0]["dense_loss"]}
    assert sparse[4]["sparse_loss"] < sparse[0]["sparse_loss"]
    assert dense[4]["dense_loss"] < dense[0]["dense_loss"]


def test_both_ways_see_the_same_batches(tmp_path):
    """Their commands differ in what they start from and where they write."""
    settings = Namespace(**{k.removeprefix("--").replace("-", "_"): v for k, v in SMALL.items()})
    found = stages(tmp_path, settings)
    sparse, dense = (
        " ".join(found[name].argv).replace(str(found[name].folder), "").split()
        for name in ("sparse", "continued")
    )
    sparse, dense = ([x for x in argv if str(tmp_path) not in x] for argv in (sparse, dense))
    assert sparse == dense
    assert "--train-only" in found["warm-up"].argv


def test_files(folder, result, capsys):
    assert (folder / "recall.png").stat().st_size > 10_000
    assert result["settings"]["topk"] == SMALL["--topk"]
    assert str(folder) not in (folder / "recall.json").read_text()
    (folder / "recall.png").unlink()
    assert main(["--render", str(folder / "recall.json")]) == 0
    assert (folder / "recall.png").exists()
    assert table(result) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give --output, a folder to run in, or --render"),
        (["--output", "x", "--topk", "512"], "--topk must be below --seq-length 512"),
        (["--output", "x", "--interval", "0"], "--interval must be at least 1, got 0"),
    ],
)
def test_refused(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err
