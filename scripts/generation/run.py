"""generate.py after its command line: load, generate, print."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.generation.blocks import BLOCK_SIZE
from absorbed_mla.generation.cuda_graphs import NUM_CUDA_GRAPHS, deleting_graphs
from absorbed_mla.generation.engine import Engine
from absorbed_mla.generation.options import EngineOptions
from absorbed_mla.generation.requests import Result
from console.script import FAILED
from generation.model import check_model, load_model
from generation.output import JsonOutput, TextOutput, Totals
from generation.prompts import read_prompts
from generation.tokenizers import ByteText, HuggingFaceText, build_text
from training import distributed
from training.checkpoint_model import require_same_model
from training.model_options import padded_vocab_size, resolve_model
from training.presets import ModelPreset
from training.start import read_start

# Usual number of rows of an embedding without a token: padding, and rows that models reserve.
_USUAL_PADDING = 1024


def generate(args: argparse.Namespace) -> int:
    """Generate for a checked command line; returns the exit code.

    Raises:
        ValueError: If model, tokenizer, prompts and options do not fit each other.
    """
    start = read_start(args.load, finetune=True)
    model = resolve_model(args)
    tokenizer = build_text(args.tokenizer)
    model = model.replace(vocab_size=_vocab_size(args, model, tokenizer))
    if args.add_bos and tokenizer.bos is None:
        raise ValueError("--add-bos: the tokenizer has no token that begins a text")
    check_model(args, model)
    require_same_model(args, start, model, "generate.py")
    _mention_tokenizer(args, model, tokenizer)
    limit = _max_sequence_length(args, model)
    # Only one process may read stdin.
    given = read_prompts(args) if distributed.rank() == 0 else []

    device = distributed.initialize(args)
    box = [[_encode(args, tokenizer, prompt) for prompt in given]]
    dist.broadcast_object_list(box, src=0)
    [prompts] = box
    parity = batch_invariant_mode() if args.batch_invariant else contextlib.nullcontext()
    with parity, deleting_graphs(args.cuda_graphs):
        gpt = load_model(args, model, device)
        engine = _engine(args, gpt, prompts, limit, tokenizer.vocab_size)
        output = _output(args, tokenizer, given, prompts) if distributed.rank() == 0 else None
        stop = None if args.ignore_eos else tokenizer.eod
        begin = time.perf_counter()
        results = engine.generate(
            prompts, dataclasses.replace(args.sampling, stop_token=stop), output
        )
    if output is not None:
        output.finish(_totals(prompts, results, time.perf_counter() - begin))
    return FAILED if any(result.error for result in results) else 0


def _output(
    args: argparse.Namespace,
    tokenizer: ByteText | HuggingFaceText,
    given: list[bytes],
    prompts: list[list[int]],
) -> JsonOutput | TextOutput:
    titles = [prompt.decode("utf-8", errors="replace") for prompt in given]
    streams = [tokenizer.stream(prompt) for prompt in prompts]
    if args.json:
        return JsonOutput(titles, streams, sys.stdout)
    return TextOutput(titles, streams, sys.stdout, sys.stderr)


def _vocab_size(
    args: argparse.Namespace, model: ModelPreset, tokenizer: ByteText | HuggingFaceText
) -> int:
    """Number of rows of the embedding.

    Raises:
        ValueError: If the tokenizer has more tokens.
    """
    own = args.use_checkpoint_args
    size = model.vocab_size if own else padded_vocab_size(args, model, tokenizer.vocab_size)
    if size < tokenizer.vocab_size:
        raise ValueError(
            f"{_name_of_tokenizer(args)} has {tokenizer.vocab_size} tokens, but the model in "
            f"{args.load} {size}; give the --tokenizer that the model was trained with"
        )
    return size


def _mention_tokenizer(
    args: argparse.Namespace, model: ModelPreset, tokenizer: ByteText | HuggingFaceText
) -> None:
    """Warn if the tokenizer seems to belong to another model."""
    if model.vocab_size > 2 * tokenizer.vocab_size + _USUAL_PADDING and not distributed.rank():
        print(
            f"generate.py: warning: {_name_of_tokenizer(args)} has {tokenizer.vocab_size} tokens, "
            f"but the model {model.vocab_size}; it was probably trained with another --tokenizer",
            file=sys.stderr,
            flush=True,
        )


def _name_of_tokenizer(args: argparse.Namespace) -> str:
    return f"the tokenizer in {args.tokenizer}" if args.tokenizer else "bytes (no --tokenizer)"


def _max_sequence_length(args: argparse.Namespace, model: ModelPreset) -> int:
    """Maximum number of tokens of a prompt and its continuation."""
    longest = model.max_position_embeddings
    if args.max_sequence_length is None:
        return longest
    if not 2 <= args.max_sequence_length <= longest:
        raise ValueError(
            f"--max-sequence-length must be from 2 to the model's --max-position-embeddings "
            f"{longest}, got {args.max_sequence_length}"
        )
    return args.max_sequence_length


def _encode(
    args: argparse.Namespace, tokenizer: ByteText | HuggingFaceText, prompt: bytes
) -> list[int]:
    begin = [tokenizer.bos] if args.add_bos and tokenizer.bos is not None else []
    return begin + tokenizer.encode(prompt).tolist()


def _engine(
    args: argparse.Namespace, gpt: GPTModel, prompts: list[list[int]], limit: int, vocab_size: int
) -> Engine:
    """An engine with a cache for these prompts.

    Raises:
        ValueError: If the GPU has not enough memory.
    """
    needed = [min(len(prompt) + args.sampling.num_tokens, limit) for prompt in prompts]
    # A prompt that is too long is refused, and takes no room in the cache.
    running = [n for n, prompt in zip(needed, prompts) if len(prompt) < limit]
    at_a_time = min(args.max_requests, len(prompts))
    blocks = sum(-(-n // BLOCK_SIZE) for n in sorted(running)[-at_a_time:])
    cache_tokens = args.cache_tokens or max(1, blocks) * BLOCK_SIZE
    options = EngineOptions(
        max_sequence_length=max(2, *needed),
        max_requests=at_a_time,
        cache_tokens=cache_tokens,
        step_tokens=args.step_tokens,
        vocab_size=vocab_size,
        seed=args.seed,
        chunked_prefill=not args.no_chunked_prefill,
        prefix_caching=not args.no_prefix_caching,
        num_cuda_graphs=NUM_CUDA_GRAPHS if args.cuda_graphs else None,
    )
    try:
        return Engine(gpt, options)
    except torch.OutOfMemoryError as error:
        graphs = " with --cuda-graphs" if args.cuda_graphs else ""
        raise ValueError(
            f"--cache-tokens: a cache of {cache_tokens} tokens{graphs} does not fit into this "
            f"GPU's memory; fewer do, or a smaller --max-requests ({args.max_requests})"
        ) from error


def _totals(prompts: list[list[int]], results: list[Result], seconds: float) -> Totals:
    failed = [bool(result.error) for result in results]
    return Totals(
        prompts=len(prompts),
        failed=sum(failed),
        prompt_tokens=sum(len(p) for p, bad in zip(prompts, failed) if not bad),
        generated_tokens=sum(len(result.tokens) for result in results),
        seconds=seconds,
    )
