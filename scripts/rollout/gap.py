"""By how much the log-probabilities of rollout and trainer differ, case by case."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from generation.engine import GenerationEngine
from generation.sampling import Sampling
from rollout.arguments import parse_arguments
from rollout.gap_entry import CASES
from rollout.model import build_policy_model
from rollout.policy import token_log_probs
from rollout.samples import Sample, SampleBatch
from training import distributed
from training.checkpoint_model import require_same_model
from training.data import read_corpus
from training.model import unwrap
from training.model_options import padded_vocab_size
from training.start import read_start
from training.tokenizers import ByteTokenizer


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


def measure_all(own: argparse.Namespace, model_options: Sequence[str]) -> Iterator[Gap]:
    """Every case, for every length of the prompts; collective.

    Raises:
        ValueError: If options do not fit each other.
    """
    text = read_corpus(own.data, ByteTokenizer()).tokens
    device = None
    for options in CASES:
        size = f"--num-tokens-to-generate {own.num_tokens_to_generate}"
        argv = [*model_options, *options.split(), *size.split()]
        args = parse_arguments(argv, distributed.world_size())
        vocab_size = padded_vocab_size(args, args.model, ByteTokenizer.vocab_size)
        args.model = args.model.replace(vocab_size=vocab_size)
        if device is None:
            if args.load:
                start = read_start(args.load, finetune=True)
                require_same_model(args, start, args.model, "rollout_gap.py")
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
