"""scripts/rollout_train.py: sampling and training one live model, rewards, command line.

If these fail, the example of reinforcement learning does not learn, or not from what it sampled.
"""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.dsa.indexer import Indexer
from console.script import Failure
from rollout.arguments import parse_arguments
from rollout.entry import main
from rollout.gap import measure, runs
from rollout.gap_entry import CASES, require_parity
from rollout.loop import RolloutTrainer
from rollout.policy import build_policy, token_log_probs
from rollout.rewards import REWARDS, group_advantages
from rollout.run import build_trainer
from rollout.samples import Sample, SampleBatch
from tests.support import world
from tests.support.auxiliary_losses import forget_auxiliary_losses
from tests.support.combinations import without
from tests.support.programs import run_script
from training import megatron_loop
from training.arguments import set_vocabulary

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "rollout_train.py"
SMALL = (
    "--num-experts 0 --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 "
    "--num-tokens-to-generate 12 --num-prompts 8 --group-size 6 --micro-batch-size 24 --lr 6e-3"
)

SPARSE = "--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 32 --dsa-indexer-topk 8"


def trainer_of(options: str) -> RolloutTrainer:
    """A run in this process."""
    args = parse_arguments(options.split(), 1)
    megatron_loop.seed(args.seed)
    forget_auxiliary_losses()
    return build_trainer(args, world.device())


def records(options: str) -> list[dict]:
    """Metrics of a run of a small model."""
    trainer = trainer_of(f"{SMALL} {options}")
    trainer.run()
    return trainer.metrics.records


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_of_the_gap(device):
    """On a GPU parity mode in fp32 is left out, and nothing else."""
    cases = [parse_arguments(f"{SMALL} {options}".split(), 1) for options in CASES]
    left_out = [c for c, args in zip(CASES, cases) if not runs(args, torch.device(device))]
    assert left_out == (["--batch-invariant"] if device == "cuda" else [])


class TestRun:
    def test_the_reward_rises(self):
        rows = records("--train-iters 14")
        first, last = ([row["reward"] for row in part] for part in (rows[:4], rows[-4:]))
        # The mean of 48 samples varies by a seventh of their deviation.
        noise = max(row["reward_deviation"] for row in rows) / 48**0.5
        assert min(last) > max(first) + 5 * noise
        # Log-probs about 5.
        assert 0 < max(row["log_prob_gap_max"] for row in rows) < 2e-5

    def test_without_learning_it_does_not(self):
        """So the one above measures learning, and not a drift of the sampler."""
        rows = records("--train-iters 2 --lr 0")
        rewards = [row["reward"] for row in rows]
        assert max(rewards) < 0.1

    @pytest.mark.parametrize(
        "options",
        without(["", "--bf16 --shared-prefixes", "--num-experts 4 --moe-layer-freq [0,1]"], ""),
        ids=str,
    )
    def test_parity_mode_has_no_gap(self, options):
        if world.device().type == "cuda" and "--bf16" not in options:
            options += " --bf16"  # what the kernels of parity mode compute in
        with batch_invariant_mode(world.device().type):
            rows = records(f"--train-iters 2 --batch-invariant {options}")
        assert [row["log_prob_gap_max"] for row in rows] == [0, 0]

    @pytest.mark.parametrize("replay", ["", " --replay"])
    def test_replay(self, replay, monkeypatch):
        """Routers and indexers that choose otherwise than in the rollout make no gap then."""
        options = "--experimental-attention-variant dsa --num-experts 4 --moe-layer-freq [0,1]"
        trainer = trainer_of(f"{SMALL} {SPARSE} {options} --train-iters 1{replay}")
        rollout = trainer.rollout

        def then_choose_otherwise(step):
            samples = rollout(step)
            for module in trainer.model.modules():
                if isinstance(module, TopKRouter):
                    module.expert_bias.copy_(torch.rand_like(module.expert_bias))
                elif isinstance(module, Indexer):
                    for weight in module.parameters():
                        weight.data.normal_()
            return samples

        monkeypatch.setattr(trainer, "rollout", then_choose_otherwise)
        trainer.run()
        [row] = trainer.metrics.records
        assert row["log_prob_gap_max"] < 2e-5 if replay else row["log_prob_gap_max"] > 1e-3

    def test_shared_prefixes(self):
        """The same step on packs in which a prompt stands once; microbatches cut a group."""
        options = (
            "--num-experts 4 --moe-layer-freq [0,1] --moe-aux-loss-coeff 0 --train-iters 1 "
            "--num-prompts 3 --group-size 4 --micro-batch-size 6 --num-tokens-to-generate 6"
        )
        [plain], [shared] = (records(f"{options}{flag}") for flag in ("", " --shared-prefixes"))
        for name in ("reward", "loss", "entropy", "grad_norm"):
            assert shared[name] == pytest.approx(plain[name], rel=1e-5)
        assert shared["log_prob_gap_max"] < 2e-5
        first, second, third = map(len, parse_arguments([], 1).prompts[:3])
        saved = shared["unshared_pack_tokens"] - shared["pack_tokens"]
        # Of four, two and two, and four samples.
        assert saved == 3 * first + 2 * second + 3 * third

    @pytest.mark.parametrize("gap", [1e-9, float("nan"), 0.0])
    def test_a_gap_in_parity_mode_fails(self, gap, monkeypatch, capsys):
        """The exit code is what a script that runs this one looks at."""
        monkeypatch.delenv("RANK", raising=False)
        rows = [{"iteration": i, "log_prob_gap_max": x} for i, x in ((1, 0.0), (2, gap))]
        trainer = mock.Mock(**{"metrics.records": rows})
        with (
            mock.patch("rollout.run.build_trainer", return_value=trainer),
            mock.patch("rollout.run.count_parameters", return_value=1),
            mock.patch.object(megatron_loop, "initialize", return_value=world.device()),
            mock.patch.object(megatron_loop, "finish"),
        ):
            code = main(["--batch-invariant", "--num-experts", "0"])
            assert main(["--num-experts", "0"]) == 0
        error = capsys.readouterr().err
        row = {"options": "--form auto", "largest": 1.0, "prompt_length": 9}
        of_parity = {**row, "options": "--batch-invariant --bf16", "largest": gap}
        if gap == 0:
            assert (code, error) == (0, "")
            require_parity([row, of_parity])
            return
        assert code == 1
        assert error.startswith("rollout_train.py: error: --batch-invariant: the log-probabil")
        assert f"differ in 1 of 2 steps, first in step 2, by {gap:.1e}" in error
        with pytest.raises(Failure, match="--batch-invariant --bf16: the log-probabilities"):
            require_parity([row, of_parity])

    def test_the_seed_decides(self):
        measured = ("reward", "loss", "grad_norm", "entropy", "tokens")
        runs = [
            [[row[name] for name in measured] for row in records(f"--train-iters 2 --seed {seed}")]
            for seed in (1, 1, 2)
        ]
        assert runs[0] == runs[1] != runs[2]

    def test_a_gap_is_seen(self, monkeypatch):
        """Log-probs that are not those of the weights that sampled."""
        of = SampleBatch.of

        def shifted(samples, *others):
            moved = [
                Sample(s.prompt, s.tokens, [x + 0.5 for x in s.log_probs], s.reward, s.advantage)
                for s in samples
            ]
            return of(moved, *others)

        monkeypatch.setattr(SampleBatch, "of", shifted)
        [row] = records("--train-iters 1")
        assert row["log_prob_gap_mean"] == pytest.approx(0.5, abs=1e-4)
        assert row["log_prob_gap_max"] == pytest.approx(0.5, abs=1e-4)


def test_a_gap_in_bf16_is_that_of_roundings():
    """Logits of one forward and of a forward for every token, in bf16; see rollout_gap.py."""
    args = parse_arguments(f"{SMALL} --bf16 --init-method-std 0.2".split(), 1)
    set_vocabulary(args, 257)
    megatron_loop.seed(args.seed)
    model, _, _ = build_policy(args, world.device())
    gap = measure(
        model, [[*range(start, start + 40)] for start in range(4)], args, "", world.device()
    )
    assert gap["tokens"] == 4 * 12
    # bf16 keeps 8 bits: logits up to 8 have neighbours 1/32 apart.
    assert 0 < gap["largest"] < 0.2
    assert abs(gap["divergence"]) < gap["mean"] < 0.02


class TestSamples:
    def test_of_a_group_share_its_prompt(self):
        """Rewards are compared with those of the same prompt, and of no other."""
        trainer = trainer_of(f"{SMALL} --reward even")
        first, second = trainer.rollout(0), trainer.rollout(1)
        for samples in (first, second):
            groups = [samples[start : start + 6] for start in range(0, 48, 6)]
            assert len({tuple(group[0].prompt) for group in groups}) == 8
            for group in groups:
                assert all(sample.prompt == group[0].prompt for sample in group)
                rewards = [REWARDS["even"](sample.tokens, 12) for sample in group]
                assert [sample.reward for sample in group] == rewards
                assert [sample.advantage for sample in group] == group_advantages(rewards)
        assert [s.tokens for s in first] != [s.tokens for s in second]

    def test_targets_are_the_sampled_tokens(self):
        samples = [
            Sample([9, 8, 7], [1, 2], [-1.0, -2.0], 0.5, 1.5),
            Sample([6], [3, 4, 5, 0], [-3.0, -4.0, -5.0, -6.0], 0.5, -0.5),
        ]
        batch = SampleBatch.of(samples, 6, torch.device("cpu"))
        assert batch.tokens.tolist() == [[9, 8, 7, 1, 0, 0], [6, 3, 4, 5, 0, 0]]
        assert batch.targets[batch.sampled].tolist() == [1, 2, 3, 4, 5, 0]
        assert batch.log_probs[batch.sampled].tolist() == [-1, -2, -3, -4, -5, -6]
        assert batch.advantages[batch.sampled].tolist() == [1.5] * 2 + [-0.5] * 4
        assert batch.sampled.sum(1).tolist() == [2, 4]
        assert not batch.log_probs[~batch.sampled].any()
        assert batch.positions.tolist() == [[*range(6)]] * 2

    def test_log_probs(self):
        logits = torch.randn(2, 3, 5, dtype=torch.float64)
        targets = torch.tensor([[0, 4, 2], [3, 3, 1]])
        probs = torch.softmax(logits.float(), -1)
        expected = [[probs[i, j, targets[i, j]].log() for j in range(3)] for i in range(2)]
        assert torch.allclose(token_log_probs(logits, targets), torch.tensor(expected))


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("digits", [48, 57, 47, 58], 0.5),
        ("letters", [65, 90, 97, 122, 64, 91, 96, 123], 0.5),
        ("even", [0, 2, 3, 256], 0.75),
        ("alternating", [1, 2, 3, 3, 4], 0.75),
        ("ascending", [1, 2, 2, 9, 256], 0.5),
    ],
)
def test_rewards(name, tokens, expected):
    reward = REWARDS[name]
    assert reward(tokens, len(tokens)) == expected
    # Ending early does not pay.
    good = {"digits": [48, 49], "letters": [65, 66], "even": [2, 4]}.get(name, [2, 3])
    assert 0 < reward(good, 12) < 0.2
    assert reward(good[:1], 1) <= 1


def test_advantages():
    assert group_advantages([0.0, 1.0]) == [-1.0, 1.0]
    assert group_advantages([0.25] * 4) == [0.0] * 4
    values = group_advantages([0.1, 0.2, 0.6])
    assert sum(values) == pytest.approx(0)
    assert sum(x * x for x in values) == pytest.approx(3)


class TestCommandLine:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("--group-size 1", "--group-size must be at least 2"),
            ("--num-prompts 0", "--num-prompts must be at least 1"),
            ("--reward luck", "--reward"),
            ("--prompts nowhere.txt", "--prompts: there is no file nowhere.txt"),
            ("--seq-length 64", "does not take --seq-length"),
            ("--hidden-dropout=0.1", "does not take --hidden-dropout"),
            ("--bogus", "unrecognized arguments: --bogus"),
            (
                "--micro-batch-size 5",
                "the default num_prompts 8 x the default group_size 8 samples",
            ),
            ("--use-checkpoint-args", "--load"),
            ("--tensor-parallel-parts 4", "needs --batch-invariant"),
            ("--shared-prefixes --replay", "--shared-prefixes does not go with --replay"),
            (
                "--num-prompts 3 --group-size 8 --micro-batch-size 6",
                "--num-prompts 3 must be divisible by the 2 ranks",
            ),
        ],
    )
    def test_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            parse_arguments(options.split(), 2 if "ranks" in message else 1)

    def test_prompts_of_a_file(self, tmp_path):
        (tmp_path / "prompts.txt").write_bytes(b"ab\n\nc")
        args = parse_arguments(["--prompts", str(tmp_path / "prompts.txt")], 1)
        assert args.prompts == [[256, 97, 98], [256], [256, 99]]

    def test_files(self, tmp_path, monkeypatch):
        """In a process of its own: saves, writes metrics and a plot; the weights start another."""
        monkeypatch.chdir(tmp_path)
        output = _script(
            f"{SMALL} --train-iters 1 --save trained --metrics rows.jsonl --plot rewards.png"
        )
        assert "step    1/1 | reward" in output
        [row] = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
        assert {"reward", "rollout_tokens_per_second", "memory_mib"} <= row.keys()
        assert Path("rewards.png").stat().st_size > 1000
        batch = "--group-size 4 --micro-batch-size 32 --train-iters 1"
        trainer = trainer_of(f"{batch} --load trained --use-checkpoint-args")
        # Of the same seed, one step apart: a third of --lr, while it warms up.
        start, trained = (
            {n: p.detach() for n, p in t.model.named_parameters()}
            for t in (trainer_of(SMALL), trainer)
        )
        assert start.keys() == trained.keys()
        moved = max(float((trained[n] - start[n]).abs().max()) for n in start)
        assert moved == pytest.approx(2e-3, rel=0.1)
        trainer.run()
        assert trainer.metrics.records[0]["log_prob_gap_max"] < 2e-5


def _script(options: str) -> str:
    done = run_script(SCRIPT, *options.split())
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
