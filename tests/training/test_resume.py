"""scripts/train.py as a whole, in a process of its own: resuming, starting from weights, errors.

If these fail, a run that was interrupted does not continue as if it had not been.
"""

import re
import shutil
from pathlib import Path

import pytest
from megatron.core import dist_checkpointing

from checkpoint_conversion.megatron_args import from_megatron_args
from counting import count_from
from training.metrics import read_metrics, series

_SMALL = (
    "--num-layers 2 --moe-layer-freq [0,1] --hidden-size 32 --ffn-hidden-size 64 --seq-length 32"
)
_RUN = f"{_SMALL} --micro-batch-size 2 --global-batch-size 4 --hidden-dropout 0.1 --train-iters 6"

_FROM_ARGS = "--use-checkpoint-args --load"


def _losses(tmp_path: Path, name: str) -> list[dict]:
    records = read_metrics(tmp_path / name)
    return [series(records, key) for key in ("train_loss", "valid_loss", "grad_norm", "lr")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, train) -> Path:
    folder = tmp_path_factory.mktemp("training")
    (folder / "text.txt").write_text(count_from(0, 700))
    run = f"{_RUN} --data text.txt --metrics whole.jsonl --save whole --save-interval 3"
    train(folder, run)
    return folder


def test_a_resumed_run_has_the_same_losses_to_the_last_bit(uninterrupted, train):
    folder = uninterrupted
    run = f"{_RUN} --data text.txt --metrics parts.jsonl --save parts"
    train(folder, f"{run} --exit-interval 4")
    output = train(folder, f"{run} --load parts")
    assert "resumed at iteration 4" in output
    assert _losses(folder, "parts.jsonl") == _losses(folder, "whole.jsonl")


def test_bf16_is_resumed_as_exactly(uninterrupted, train):
    """Including the fp32 copies of the parameters, which are not part of the model."""
    folder = uninterrupted
    for name, stop in (("bf16", ""), ("halves", "--exit-interval 4")):
        run = f"{_RUN} --data text.txt --bf16 --metrics {name}.jsonl --save {name}"
        train(folder, f"{run} {stop}")
    train(folder, f"{run} --load halves")
    assert _losses(folder, "halves.jsonl") == _losses(folder, "bf16.jsonl")


def test_the_optimizers_options_may_change(uninterrupted, train):
    """They need not be those of the first run; the new ones are used."""
    folder = uninterrupted
    options = "--lr 3e-4 --adam-beta2 0.5 --weight-decay 0 --lr-warmup-iters 0 --eval-iters 0"
    run = f"{_RUN} --data text.txt --load whole --train-iters 8 --metrics changed.jsonl"
    train(folder, f"{run} {options} --lr-decay-style constant")
    assert series(read_metrics(folder / "changed.jsonl"), "lr") == {7: 3e-4, 8: 3e-4}


def test_weights_taken_in_bf16_stay(uninterrupted, train):
    """The optimizer's fp32 copies must be made of the loaded weights, not of the initial ones."""
    folder = uninterrupted
    run = "--seq-length 32 --micro-batch-size 2 --train-iters 2 --data text.txt --eval-interval 1"
    load = f"{_FROM_ARGS} whole --finetune --bf16 --lr 0 --metrics bf16-weights.jsonl"
    train(folder, f"{run} {load}")
    losses = series(read_metrics(folder / "bf16-weights.jsonl"), "valid_loss")
    trained = series(read_metrics(folder / "whole.jsonl"), "valid_loss")[6]
    assert losses[1] == pytest.approx(trained, abs=0.01)
    # The biases that balance the experts do not depend on the learning rate.
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)


def test_a_checkpoint_says_what_its_model_is(uninterrupted, train):
    """A run is resumed without options of the model; the converter reads the model, too."""
    folder = uninterrupted
    data = "--data text.txt --metrics said.jsonl --save said"
    # Saved before its first step.
    train(folder, f"{_RUN} {data} --train-iters 0")
    output = train(folder, f"{_RUN.removeprefix(_SMALL)} --seq-length 32 {data} {_FROM_ARGS} said")
    assert "model      of said" in output
    assert _losses(folder, "said.jsonl") == _losses(folder, "whole.jsonl")
    common = dist_checkpointing.load_common_state_dict(str(folder / "said" / "iter_0000006"))
    config = from_megatron_args(common["args"])
    assert (config.hidden_size, config.moe_layers) == (32, (False, True))
    assert (common["iteration"], common["checkpoint_version"]) == (6, 3.0)


def test_a_release_is_weights_without_a_run(uninterrupted, train):
    folder = uninterrupted
    (folder / "released").mkdir()
    shutil.copytree(folder / "whole" / "iter_0000003", folder / "released" / "release")
    (folder / "released" / "latest_checkpointed_iteration.txt").write_text("release")
    run = "--seq-length 32 --train-iters 2 --data text.txt --seed 9"
    output = train(folder, f"{run} {_FROM_ARGS} released --metrics released.jsonl --save released")
    assert "started from the weights" in output
    # Weights of a trained model: not the loss of the first iteration.
    first = series(read_metrics(folder / "released.jsonl"), "train_loss")[1]
    assert first < series(read_metrics(folder / "whole.jsonl"), "train_loss")[1] - 0.01
    latest = (folder / "released" / "latest_checkpointed_iteration.txt").read_text()
    assert latest.strip() == "2"


@pytest.mark.parametrize(
    ("options", "code", "error"),
    [
        ("--load whole --seed 7", 2, "--load: .*/iter_0000006 differs .*--seed 1234 there, 7 .*"),
        ("--optimizer muon --muon-num-ns-steps 0", 2, "Megatron refuses these options: .*"),
        (
            "--lr 1e30 --lr-warmup-iters 0 --clip-grad 0",
            1,
            "the gradient norm is .*; lower --lr or set --clip-grad",
        ),
    ],
    ids=["another run", "Megatron's refusal", "diverged"],
)
def test_what_goes_wrong_is_one_line(uninterrupted, train, options, code, error):
    [line] = train(uninterrupted, f"{_RUN} --data text.txt {options}", expect=code).splitlines()
    assert re.fullmatch(f"train.py: error: {error}", line)
