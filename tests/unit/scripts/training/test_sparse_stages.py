"""scripts/train.py from a dense model over the warm-up of its indexer to sparse training.

If these fail, a warm-up changes the model that it should leave alone, or a stage does not begin
with what the one before has learned.
"""

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.checkpoint.distributed import load_model_weights
from absorbed_mla.dsa.warm_up import INDEXER
from counting import count_from
from tests.support import world
from tests.support.generate import Done, train
from tests.support.train_arguments import checked
from training.checkpoint import find_checkpoint
from training.metrics import read_metrics, series
from training.model import build_gpt, model_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 on the CPU")
LENGTH, TOPK = 32, 4
SMALL = "--num-layers 2 --moe-layer-freq [0,1] --hidden-size 32 --ffn-hidden-size 64"
SPARSE = f"--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk {TOPK}"
NEW = f"--new-indexer {SPARSE} --use-checkpoint-args"
WARM_UP = f"{NEW} --train-only indexer --lr 2e-2 --lr-warmup-iters 0 --lr-decay-style constant"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a text, and a dense checkpoint ``dense``."""
    folder = tmp_path_factory.mktemp("sparse")
    (folder / "text.txt").write_text(count_from(0, 700))
    # Weights large enough that the attention prefers some keys.
    ran(folder, "dense", f"{SMALL} --init-method-std 0.3 --train-iters 2")
    return folder


def run(folder: Path, name: str, line: str, load: str | None = None) -> Done:
    """One run of train.py that saves as ``name``."""
    usual = f"--seq-length {LENGTH} --micro-batch-size 2 --eval-iters 1 --log-interval 1"
    argv = [*usual.split(), "--data", folder / "text.txt", *line.split()]
    argv += ["--save", folder / name, "--metrics", folder / f"{name}.jsonl"]
    return train(*argv, *(["--load", folder / load] if load else []))


def ran(folder: Path, name: str, line: str, load: str | None = None) -> str:
    done = run(folder, name, line, load)
    assert done.code == 0, done.err
    return done.out


def tensors(folder: Path, name: str) -> dict[str, Tensor]:
    loaded = dist_checkpointing.load_plain_tensors(str(find_checkpoint(str(folder / name))))
    return {key: value for key, value in loaded.items() if isinstance(value, Tensor)}


def losses(folder: Path, name: str, key: str = "indexer_loss") -> dict[int, float]:
    return series(read_metrics(folder / f"{name}.jsonl"), key)


def weights(folder: Path, name: str) -> dict[str, Tensor]:
    return {k: v for k, v in tensors(folder, name).items() if not k.startswith("optimizer.")}


class TestWarmUp:
    @pytest.fixture(scope="class")
    def output(self, folder) -> str:
        return ran(folder, "warm", f"{WARM_UP} --train-iters 8", "dense")

    def test_the_rest_stays_to_the_bit(self, folder, output):
        before, after = weights(folder, "dense"), weights(folder, "warm")
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert any("expert_bias" in name for name in before)
        assert all(INDEXER in name for name in after.keys() - before.keys())
        assert len(after) == len(before) + 2 * 5

    def test_the_optimizer_has_the_indexer_only(self, folder, output):
        states = [name for name in tensors(folder, "warm") if name.startswith("optimizer.")]
        assert states
        assert all(INDEXER in name for name in states)

    def test_it_learns(self, folder, output):
        found = losses(folder, "warm")
        assert found[8] < 0.9 * found[1]
        for text in (
            f"| indexer loss {found[8]:.4f} |",
            "indexer    new 4 heads of 16, warms up for top-4, the attention is over all",
            "started from the weights",
            " are trained",
        ):
            assert text in output
        # The model does as before.
        assert losses(folder, "warm", "valid_loss")[8] == losses(folder, "dense", "valid_loss")[2]

    def test_recomputed_layers_learn_alike(self, folder, output):
        """Nothing before the first indexer has a gradient, and Megatron's recomputation asks."""
        recompute = "--recompute-granularity full --recompute-method uniform"
        recompute += " --recompute-num-layers 1"
        ran(folder, "recomputed", f"{WARM_UP} --train-iters 8 {recompute}", "dense")
        whole, again = (losses(folder, name) for name in ("warm", "recomputed"))
        assert again == pytest.approx(whole, rel=1e-6)

    def test_sparse_training_goes_on(self, folder, output):
        text = ran(folder, "sparse", "--use-checkpoint-args --finetune --train-iters 2", "warm")
        assert "indexer    4 heads of 16, attention over 4 keys of up to 32" in text
        before, after = weights(folder, "warm"), weights(folder, "sparse")
        assert before.keys() == after.keys()
        assert [name for name in before if torch.equal(before[name], after[name])] == []

    def test_a_stage_does_not_resume_another(self, folder, output):
        done = run(folder, "no", "--use-checkpoint-args --train-iters 9", "warm")
        assert done.code == 2
        assert "--train-only indexer there, None here. To resume, use the same" in done.err

    def test_it_resumes(self, folder, output):
        """With its optimizer's state: the same losses as without a break."""
        ran(folder, "parts", f"{WARM_UP} --train-iters 8 --exit-interval 5", "dense")
        again = WARM_UP.removeprefix(NEW)
        ran(folder, "parts", f"--use-checkpoint-args {again} --train-iters 8", "parts")
        assert losses(folder, "parts") == losses(folder, "warm")


def test_a_dense_checkpoint_is_not_taken_silently(folder):
    line = f"{SMALL} --experimental-attention-variant dsa {SPARSE} --finetune --train-iters 1"
    done = run(folder, "no", line, "dense")
    assert done.code == 2
    assert "--new-indexer gives a dense model an indexer with initial weights" in done.err


def gpt_of(folder: Path, name: str, line: str = "") -> GPTModel:
    """The model of a checkpoint, with random weights."""
    load = f"--load {folder / name} --use-checkpoint-args --form absorbed"
    return build_gpt(model_config(checked(f"{load} {line}")), world.device())


def logits_of(folder: Path, line: str) -> Tensor:
    """Of the dense checkpoint in a model of ``line``, [2, LENGTH, vocabulary]."""
    gpt = gpt_of(folder, "dense", line).eval()
    initial = (INDEXER,) if "--new-indexer" in line else ()
    load_model_weights(gpt, find_checkpoint(str(folder / "dense")), initial=initial)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand_as(tokens)
    with torch.no_grad():
        return gpt(tokens, positions, None)


def test_without_a_choice_the_sparse_model_is_the_dense_one(folder):
    dense = logits_of(folder, "")
    above = logits_of(folder, NEW.replace(f"topk {TOPK}", f"topk {LENGTH}"))
    assert torch.equal(above, dense)
    assert not torch.allclose(logits_of(folder, NEW), dense, atol=1e-3)


def test_what_is_initial_must_be_absent(folder):
    """Otherwise weights that were learned would be dropped."""
    ran(folder, "two", f"{NEW} --train-iters 1", "dense")
    gpt = gpt_of(folder, "two")
    with pytest.raises(ValueError, match=r"indexer\.linear_wk\.weight .* has no place in th"):
        load_model_weights(gpt, find_checkpoint(str(folder / "two")), initial=(INDEXER,))


@pytest.mark.parametrize("preset", ["deepseek-v3.2", "glm-5"])
def test_scaled_presets_train(folder, preset):
    line = f"--preset {preset} --scale-down 64 --train-iters 2"
    output = ran(folder, preset, line)
    assert f"attention over {LENGTH // 4} keys of up to {LENGTH}" in output
    assert all(loss > 0 for loss in losses(folder, preset).values())
    assert output.count("| indexer loss ") == 2
