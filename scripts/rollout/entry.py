"""From the command line to a finished run, with errors for people."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings

import torch

from rollout.arguments import parse_arguments
from rollout.loop import RolloutTrainer
from rollout.model import build_policy_model
from rollout.plot import plot_rollouts
from training import distributed
from training.checkpoint import Checkpointer, find_checkpoint
from training.model import count_parameters
from training.model_options import padded_vocab_size
from training.optimizer import build_optimizer
from training.tokenizers import ByteTokenizer

_USER_ERROR = 2
_FAILED = 1
_GRACE_SECONDS = 5


def main(argv: list[str]) -> int:
    """Run the script.

    Returns:
        Exit code: 0, or 2 after an error of the user's, or 1 if training diverged or a file
        could not be written.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    for name in ("megatron", "DynamicInferenceEngine"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        rollout_train(parse_arguments(argv, distributed.world_size()))
    except ValueError as error:
        return _report(error, _USER_ERROR)
    except (FloatingPointError, OSError) as error:
        return _report(error, _FAILED)
    distributed.finish()
    return 0


def rollout_train(args: argparse.Namespace) -> None:
    """Everything after the command line is known to be right."""
    if args.load:
        find_checkpoint(args.load)
    device = distributed.initialize(args)
    trainer = build_trainer(args, device)
    parameters = count_parameters(trainer.model)
    if distributed.rank() == 0:
        print(_header(args, parameters), flush=True)
    trainer.run()
    if args.save:
        run = f"reward {args.reward}"
        Checkpointer(args, args.model, trainer.model, trainer.optimizer, run).save(args.train_iters)
    if args.plot and distributed.rank() == 0:
        plot_rollouts(trainer.metrics.records, args.plot, args.reward)
        print(f"rewards and gaps: {args.plot}", flush=True)


def build_trainer(args: argparse.Namespace, device: torch.device) -> RolloutTrainer:
    """Model, optimizer and engine; collective.

    Raises:
        ValueError: If Megatron refuses the options, or ``--load`` does not fit them.
    """
    vocab_size = padded_vocab_size(args, args.model, ByteTokenizer.vocab_size)
    args.model = args.model.replace(vocab_size=vocab_size)
    model = build_policy_model(args, device)
    return RolloutTrainer(args, model, build_optimizer(args, model), device)


def _header(args: argparse.Namespace, parameters: int) -> str:
    tp = args.tensor_model_parallel_size
    start = f"the weights of {args.load}" if args.load else "random weights"
    parallel = " with sequence parallelism" if args.sequence_parallel else ""
    parity = ", parity mode" if args.batch_invariant else ""
    return (
        f"model    {parameters:,} parameters, from {start}{parity}\n"
        f"ranks    {distributed.world_size()}: TP {tp}{parallel}, "
        f"DP {distributed.world_size() // tp}\n"
        f"rollout  {args.num_prompts} prompts x {args.group_size} samples of "
        f"{args.num_tokens_to_generate} tokens; reward: {args.reward}"
    )


def _report(error: Exception, code: int) -> int:
    """Print an error once: rank 0's, or another rank's if rank 0 does not have it."""
    rank = distributed.rank()
    if rank:
        # torchrun ends this process as soon as rank 0 has failed.
        time.sleep(_GRACE_SECONDS)
    where = f" (rank {rank})" if rank else ""
    print(
        f"rollout_train.py: error{where}: {' '.join(str(error).split())}",
        file=sys.stderr,
        flush=True,
    )
    return code
