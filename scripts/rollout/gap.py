"""By how much the log-probabilities of rollout and trainer differ, case by case."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from generation.engine import GenerationEngine
from generation.sampling import Sampling
from rollout.arguments import parse_arguments
from rollout.model import build_policy_model
from rollout.policy import token_log_probs
from rollout.samples import Sample, SampleBatch
from training import distributed
from training.data import read_corpus
from training.model import unwrap
from training.model_options import padded_vocab_size
from training.tokenizers import ByteTokenizer

# Options of a run; parity mode, which stays with the process, comes last.
CASES = tuple(
    f"{precision} {how}".strip()
    for how in ("--form absorbed", "--form expanded", "--form auto", "--batch-invariant")
    for precision in ("", "--bf16")
)
_USER_ERROR = 2


@dataclass(frozen=True)
class Gap:
    """Of one run.

    Attributes:
        options: Of the run.
        prompt_length: Tokens of each prompt.
        tokens: Sampled.
        entropy: Mean of -log-probability in the trainer, nats.
        largest: Greatest absolute difference of a token's log-probabilities.
        mean: Of the absolute differences.
        equal: Share of the tokens whose log-probabilities are equal to the bit.
        divergence: Mean of rollout minus trainer: an estimate of their divergence
            KL(rollout || trainer) in nats per token.
    """

    options: str
    prompt_length: int
    tokens: int
    entropy: float
    largest: float
    mean: float
    equal: float
    divergence: float


def main(argv: list[str]) -> int:
    """Print the table; returns the exit code."""
    for name in ("megatron", "DynamicInferenceEngine"):
        logging.getLogger(name).setLevel(logging.ERROR)
    own, model_options = _parser().parse_known_args(argv)
    rows: list[dict] = []
    try:
        for gap in measure_all(own, model_options):
            if distributed.rank():
                continue
            rows.append(asdict(gap))
            print(_line(gap), flush=True)
            if own.json:
                Path(own.json).write_text(json.dumps(rows, indent=1) + "\n")
    except ValueError as error:
        print(f"rollout_gap.py: error: {error}", file=sys.stderr)
        return _USER_ERROR
    distributed.finish()
    return 0


def measure_all(own: argparse.Namespace, model_options: Sequence[str]) -> Iterator[Gap]:
    """Every case, for every length of the prompts; collective.

    Raises:
        ValueError: If options do not fit each other.
    """
    for name in ("prompt_lengths", "samples", "num_tokens_to_generate"):
        least = min(np.atleast_1d(getattr(own, name)))
        if least < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {least}")
    text = read_corpus(own.data, ByteTokenizer()).tokens
    device = None
    for options in CASES:
        size = f"--num-tokens-to-generate {own.num_tokens_to_generate}"
        argv = [*model_options, *options.split(), *size.split()]
        args = parse_arguments(argv, distributed.world_size())
        vocab_size = padded_vocab_size(args, args.model, ByteTokenizer.vocab_size)
        args.model = args.model.replace(vocab_size=vocab_size)
        if device is None:
            device = distributed.initialize(args)
        if not runs(args, device):
            if not distributed.rank():
                print(f"{options}: left out, on a GPU with --bf16 only", file=sys.stderr)
            continue
        distributed.seed(args.seed)
        model = build_policy_model(args, device)
        for length in own.prompt_lengths:
            stride = len(text) // own.samples
            starts = range(0, own.samples * stride, stride)
            prompts = [text[start : start + length].tolist() for start in starts]
            yield measure(model, prompts, args, options or "fp32", device)


def runs(args: argparse.Namespace, device: torch.device) -> bool:
    """Whether a case can run: the kernels of parity mode on a GPU compute in bf16."""
    return not args.batch_invariant or args.bf16 or device.type == "cpu"


def measure(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    options: str,
    device: torch.device,
) -> Gap:
    """Sample after prompts of one length, and compute the same tokens as training does."""
    length = len(prompts[0]) + args.num_tokens_to_generate
    length += -length % args.tensor_model_parallel_size
    engine = GenerationEngine(
        unwrap(model), max_sequence_length=length, max_requests=len(prompts), seed=args.seed
    )
    sampling = Sampling(num_tokens=args.num_tokens_to_generate, log_probs=True)
    texts = engine.generate(prompts, sampling)
    failed = [text.error for text in texts if text.error]
    if failed:
        raise ValueError(f"a prompt cannot be continued: {failed[0]}")
    samples = [Sample(p, t.tokens, t.log_probs, 0.0, 0.0) for p, t in zip(prompts, texts)]
    batch = SampleBatch.of(samples, length, device)
    model.train()
    logits = model(batch.tokens, batch.positions, None)
    log_probs = token_log_probs(logits, batch.targets)
    # On the host: operators of parity mode on a GPU do not know fp64.
    trained, sampled = (
        x[batch.sampled].detach().cpu().double() for x in (log_probs, batch.log_probs)
    )
    difference = sampled - trained
    return Gap(
        options=options,
        prompt_length=len(prompts[0]),
        tokens=len(difference),
        entropy=-trained.mean().item(),
        largest=difference.abs().max().item(),
        mean=difference.abs().mean().item(),
        equal=(difference == 0).double().mean().item(),
        divergence=difference.mean().item(),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollout_gap.py",
        description="Compare the log-probabilities of rollout and trainer, by torchrun or alone.",
        epilog="Options of the model, --load and --use-checkpoint-args are rollout_train.py's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--prompt-lengths", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--samples", type=int, default=16, help="of each case")
    parser.add_argument("--num-tokens-to-generate", type=int, default=64)
    parser.add_argument("--data", metavar="PATH", help="text of the prompts, as for train.py")
    parser.add_argument("--json", metavar="FILE")
    return parser


def _line(gap: Gap) -> str:
    return (
        f"{gap.options:<26} prompt {gap.prompt_length:5d} | {gap.tokens} tokens, entropy "
        f"{gap.entropy:.2f} | difference max {gap.largest:.1e} mean {gap.mean:.1e}, equal "
        f"{100 * gap.equal:.1f} % | KL {gap.divergence:+.1e}"
    )
