"""scripts/rollout_train.py under tensor and data parallelism, in the processes of the test."""

import contextlib
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from absorbed_mla.batch_invariant import batch_invariant_mode
from rollout.arguments import parse_arguments
from rollout.loop import RolloutTrainer
from rollout.policy import update
from rollout.run import build_trainer
from tests.distributed.whole import of_all_ranks, shared_folder, whole_tensors
from tests.support import needs, world
from tests.support.auxiliary_losses import forget_auxiliary_losses
from tests.support.combinations import grid, two_ranks
from training import megatron_loop
from training.saving import save_checkpoint

pytestmark = two_ranks

MEASURED = ("reward", "reward_deviation", "loss", "grad_norm", "log_prob_gap_max", "tokens")
SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 "
    "--num-prompts 4 --group-size 4 --micro-batch-size 4 --num-tokens-to-generate 8 --lr 6e-3"
)


def trainer_of(options: str) -> RolloutTrainer:
    args = parse_arguments(f"{SMALL} {options}".split(), world.size())
    megatron_loop.seed(args.seed)
    forget_auxiliary_losses()
    return build_trainer(args, world.device())


def records(options: str) -> list[list[float]]:
    """What was measured in every step; the same on every rank."""
    trainer = trainer_of(options)
    trainer.run()
    rows = [[row[name] for name in MEASURED] for row in trainer.metrics.records]
    assert of_all_ranks(rows) == [rows] * world.size()
    return rows


def test_shared_prefixes():
    """The steps are those without, whose packs sequence parallelism does not pad."""
    options = f"--train-iters 1 --tensor-model-parallel-size {world.size()} "
    options += "--sequence-parallel " if world.size() > 1 else ""
    options += "--moe-layer-freq [0,1] --moe-aux-loss-coeff 0"
    with world.parallel(tp=world.size()):
        [plain], [shared] = (records(options + flag) for flag in ("", " --shared-prefixes"))
    assert shared[:4] == pytest.approx(plain[:4], rel=1e-5, abs=1e-6)
    assert shared[4] < 2e-5


@grid(1, {"layout": ("dp", "sp", "tp"), "parity": {"default": False, "parity": True}})
def test_rollout_and_trainer_agree(layout, parity):
    """Ranks that sampled other texts, or trained on other ones, would measure a large gap."""
    size, device = world.size(), world.device().type
    tp = 1 if layout == "dp" else size
    options = f"--train-iters 2 --tensor-model-parallel-size {tp}"
    if layout == "sp" and size > 1:
        options += " --sequence-parallel --moe-layer-freq [0,1] --replay"
    else:
        # Megatron trains mixtures of experts under TP only with sequence parallelism.
        options += " --num-experts 0"
    if parity:
        options += " --batch-invariant" + " --shared-prefixes" * (layout == "tp")
        if device == "cuda":
            options += " --bf16"  # what the kernels of parity mode compute in
    mode = batch_invariant_mode(device) if parity else contextlib.nullcontext()
    with mode, world.parallel(tp=tp):
        rows = records(options)
    gaps = [row[MEASURED.index("log_prob_gap_max")] for row in rows]
    assert gaps == [0, 0] if parity else max(gaps) < 2e-5


@needs.processes(2)
@needs.no_gpu
def test_bits_of_other_sizes():
    """Samples, their log-probabilities and a clipped update, over two ranks and on one."""
    found, options = [], "--batch-invariant --tensor-parallel-parts 4 --num-experts 0"
    options += " --clip-grad 0.01 --lr-warmup-iters 0"
    with batch_invariant_mode(tensor_parallel_parts=4), shared_folder() as folder:
        for tp, where in ((2, "--save"), (1, "--load")):
            with world.parallel(tp=tp):
                more = f"--tensor-model-parallel-size {tp} {where} {folder}"
                trainer = trainer_of(f"{options} {more}")
                state = trainer.optimizer, trainer.scheduler
                if tp == 2:
                    save_checkpoint(1, [trainer.model], *state, 0)
                # On one rank each does all of it, whose mean is that of one.
                trainer._ranks, trainer._rank = 1, 0
                samples = of_all_ranks(trainer.rollout(0))[0]
                record = update(trainer.model, *state, trainer._batches(samples))
                del record["tokens"]
                weights = whole_tensors(trainer.model.named_parameters())
                texts = [(one.tokens, one.log_probs) for one in samples]
                found.append((texts, record, {k: x.tolist() for k, x in weights.items()}))
    assert found[0][1]["log_prob_gap_max"] == 0 < 0.01 < found[0][1]["grad_norm"]
    for one, other in zip(*found, strict=True):
        assert one == other
