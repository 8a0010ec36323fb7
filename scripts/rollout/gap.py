"""Measures the gap between log-probabilities of the rollout and of the training forward."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer
from console.ranks import rank, world_size
from rollout.arguments import parse_arguments
from rollout.gap_entry import CASES
from rollout.policy import build_policy, token_log_probs
from rollout.samples import Sample, SampleBatch
from training import megatron_loop
from training.arguments import set_vocabulary
from training.checkpoint import read_start
from training.checkpoint_model import require_same_model
from training.data import read_corpus


def measure_all(own: argparse.Namespace, model_options: Sequence[str]) -> Iterator[dict]:
    """Measure every case with every prompt length; collective.

    Raises:
        ValueError: If options do not fit each other.
    """
    text = read_corpus(own.data, ByteTokenizer()).tokens
    device = None
    for options in CASES:
        size = f"--num-tokens-to-generate {own.num_tokens_to_generate}"
        argv = [*model_options, *options.split(), *size.split()]
        args = parse_arguments(argv, world_size())
        set_vocabulary(args, ByteTokenizer.vocab_size)
        if device is None:
            if args.load:
                start = read_start(args.load, finetune=True)
                require_same_model(args, start, "rollout_gap.py")
            device = megatron_loop.initialize(args)
        if not runs(args, device):
            if not rank():
                print(f"{options}: left out, on a GPU with --bf16 only", file=sys.stderr)
            continue
        megatron_loop.seed(args.seed)
        model, _, _ = build_policy(args, device)
        for length in own.prompt_lengths:
            stride = len(text) // own.samples
            starts = range(0, own.samples * stride, stride)
            prompts = [text[start : start + length].tolist() for start in starts]
            yield measure(model, prompts, args, options or "fp32", device)


def runs(args: argparse.Namespace, device: torch.device) -> bool:
    """Whether a case can run: on a GPU, the kernels of parity mode compute in bf16 only."""
    return not args.batch_invariant or args.bf16 or device.type == "cpu"


def measure(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    case: str,
    device: torch.device,
) -> dict:
    """Sample after prompts of one length, and compute the samples in the training forward.

    Returns:
        A row: options of the case, tokens of each prompt, number of sampled tokens; ``entropy``,
        the mean of -log-probability in the training forward in nats; of the absolute differences
        of a token's two log-probabilities the ``largest``, the ``mean`` and the share of those that
        are bitwise ``equal`` to 0; ``divergence``, the mean of rollout minus training, an estimate
        of KL(rollout || training) in nats per token.
    """
    length = len(prompts[0]) + args.num_tokens_to_generate
    length += -length % args.tensor_model_parallel_size
    sampling = SamplingParams(max_tokens=args.num_tokens_to_generate, logprobs=0)
    with LLM.from_model(
        model, max_model_len=length, max_num_seqs=len(prompts), seed=args.seed
    ) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    continuations = [output.outputs[0] for output in outputs]
    samples = [
        Sample(prompt, one.token_ids, one.token_logprobs, 0.0, 0.0)
        for prompt, one in zip(prompts, continuations)
    ]
    batch = SampleBatch.of(samples, length, device)
    model.train()
    logits = model(batch.tokens, batch.positions, None)
    log_probs = token_log_probs(logits, batch.targets)
    # On the CPU, because the operators of parity mode on a GPU do not support fp64.
    trained, sampled = (
        x[batch.sampled].detach().cpu().double() for x in (log_probs, batch.log_probs)
    )
    difference = sampled - trained
    return {
        "options": case,
        "prompt_length": len(prompts[0]),
        "tokens": len(difference),
        "entropy": -trained.mean().item(),
        "largest": difference.abs().max().item(),
        "mean": difference.abs().mean().item(),
        "equal": (difference == 0).double().mean().item(),
        "divergence": difference.mean().item(),
    }
