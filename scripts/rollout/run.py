"""rollout_train.py after its command line: build, train, save, plot."""

from __future__ import annotations

import argparse

import torch

from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer
from console.ranks import rank, world_size
from console.script import Failure
from rollout.loop import RolloutTrainer
from rollout.plot import plot_rollouts
from rollout.policy import build_policy
from training import megatron_loop
from training.arguments import set_vocabulary
from training.checkpoint import read_start
from training.checkpoint_model import require_same_model
from training.model import count_parameters
from training.saving import save_checkpoint


def rollout_train(args: argparse.Namespace) -> None:
    """Train as a checked command line says.

    Raises:
        ValueError: If the checkpoint, or Megatron, does not accept the options.
        Failure: If any log-probability differs in parity mode.
    """
    if args.load:
        set_vocabulary(args, ByteTokenizer.vocab_size)
        start = read_start(args.load, finetune=True)
        require_same_model(args, start, "rollout_train.py")
    args.data_fingerprint = f"reward {args.reward}"
    device = megatron_loop.initialize(args)
    trainer = build_trainer(args, device)
    parameters = count_parameters(trainer.model)
    if not rank():
        print(_header(args, parameters), flush=True)
    trainer.run()
    if args.save:
        state = [trainer.model], trainer.optimizer, trainer.scheduler
        save_checkpoint(args.train_iters, *state, 0)
    if args.plot and not rank():
        plot_rollouts(trainer.metrics.records, args.plot, args.reward)
        print(f"rewards and gaps: {args.plot}", flush=True)
    if args.batch_invariant:
        require_no_gap(trainer.metrics.records)


def require_no_gap(records: list[dict]) -> None:
    """Check that rollout and training agree in every step of parity mode.

    Args:
        records: Of the metrics file; every rank has them.

    Raises:
        Failure: If the log-probabilities differ in any step; NaN is a difference.
    """
    different = [record for record in records if record["log_prob_gap_max"] != 0]
    if different:
        first = different[0]
        raise Failure(
            "--batch-invariant: the log-probabilities of rollout and trainer differ in "
            f"{len(different)} of {len(records)} steps, first in step {first['iteration']}, by "
            f"{first['log_prob_gap_max']:.1e}"
        )


def build_trainer(args: argparse.Namespace, device: torch.device) -> RolloutTrainer:
    """Build model, optimizer and engine; collective.

    Raises:
        ValueError: If Megatron refuses the options, or ``--load`` does not fit them.
    """
    set_vocabulary(args, ByteTokenizer.vocab_size)
    return RolloutTrainer(args, build_policy(args, device), device)


def _header(args: argparse.Namespace, parameters: int) -> str:
    tp = args.tensor_model_parallel_size
    start = f"the weights of {args.load}" if args.load else "random weights"
    parallel = " with sequence parallelism" if args.sequence_parallel else ""
    parity = ", parity mode" if args.batch_invariant else ""
    return (
        f"model    {parameters:,} parameters, from {start}{parity}\n"
        f"ranks    {world_size()}: TP {tp}{parallel}, "
        f"DP {world_size() // tp}\n"
        f"rollout  {args.num_prompts} prompts x {args.group_size} samples of "
        f"{args.num_tokens_to_generate} tokens; reward: {args.reward}"
    )
