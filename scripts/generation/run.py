"""generate.py after its command line: load, generate, print."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from absorbed_mla import LLM
from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE
from absorbed_mla.serving.tokenizers.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    open_tokenizer,
)
from console.llm_flags import errors_by_flag
from console.ranks import rank
from console.script import FAILED
from generation.arguments import with_model
from generation.model import check_model, load_model, set_rows, warn_of_small_tokenizer
from generation.output import JsonOutput, TextOutput
from training import megatron_loop
from training.checkpoint import read_start
from training.checkpoint_model import require_same_model
from training.checks import complete, validate_by_megatron


def generate(args: argparse.Namespace) -> int:
    """Generate for a checked command line; returns the exit code.

    Raises:
        ValueError: If model, tokenizer, prompts and options do not fit each other.
    """
    start = read_start(args.load, finetune=True)
    with errors_by_flag():
        tokenizer = open_tokenizer(
            args.tokenizer or "bytes", None, trust_remote_code=args.trust_remote_code
        )
    assert isinstance(tokenizer, ByteTokenizer | HuggingFaceTokenizer)
    if args.add_bos and tokenizer.begin_token is None:
        raise ValueError("--add-bos: the tokenizer has no token that begins a text")
    args = with_model(args)
    complete(args)
    set_rows(args, tokenizer)
    check_model(args)
    require_same_model(args, start, "generate.py")
    warn_of_small_tokenizer(args, tokenizer)
    validate_by_megatron(args)
    # Only one process may read stdin.
    given = read_prompts(args) if rank() == 0 else []

    # Megatron wants a seed above 0.
    of_process = argparse.Namespace(**{**vars(args), "seed": args.seed or 1})
    device = megatron_loop.initialize(of_process)
    box = [given]
    dist.broadcast_object_list(box, src=0)
    [texts] = box
    prompts = [tokenizer.encode(text, begin=args.add_bos) for text in texts]
    parity = batch_invariant_mode() if args.batch_invariant else contextlib.nullcontext()
    with parity, errors_by_flag():
        gpt = load_model(args, device)
        limit = args.max_sequence_length or args.max_position_embeddings
        options = args.llm | _sizes(args, list(map(len, prompts)), limit)
        with LLM.from_model(gpt, tokenizer=tokenizer, **options) as llm:
            llm.wake()
            return _run(llm, prompts, args, _output(args, texts))


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts; a blank line is an empty one, lone surrogates stand for bytes that are no UTF-8.

    Raises:
        ValueError: If there is none.
        OSError: If a file cannot be read.
    """
    if args.prompt is not None:
        return [_text(os.fsencode(prompt)) for prompt in args.prompt]
    if args.prompt_file is not None:
        source, content = args.prompt_file, Path(args.prompt_file).read_bytes()
    else:
        if sys.stdin.isatty():
            print("prompts, one per line; Ctrl-D ends them:", file=sys.stderr, flush=True)
        source, content = "stdin", sys.stdin.buffer.read()
    if not content:
        raise ValueError(f"there is no prompt in {source}; --prompt or --prompt-file gives some")
    lines = content.removesuffix(b"\n").split(b"\n")
    return [_text(line.removesuffix(b"\r")) for line in lines]


def _text(prompt: bytes) -> str:
    return prompt.decode("utf-8", errors="surrogateescape")


def _sizes(args: argparse.Namespace, lengths: Sequence[int], limit: int) -> dict[str, int]:
    """Options of ``LLM``: no more requests and cache than prompts of these lengths need."""
    needed = [min(length + args.num_tokens_to_generate, limit) for length in lengths]
    at_a_time = min(args.max_requests, len(lengths))
    # A prompt that is too long is refused, and takes no room in the cache.
    running = sorted(n for n, length in zip(needed, lengths) if length < limit)[-at_a_time:]
    blocks = sum(-(-tokens // BLOCK_SIZE) for tokens in running)
    return {
        "max_model_len": max(2, *needed),
        "max_num_seqs": at_a_time,
        "cache_tokens": args.cache_tokens or max(1, blocks) * BLOCK_SIZE,
    }


def _output(args: argparse.Namespace, texts: Sequence[str]) -> TextOutput | JsonOutput:
    """Where the first process shows everything, and the others nothing."""
    # Bytes that are no UTF-8 become replacement characters.
    titles = [text.encode(errors="surrogateescape").decode(errors="replace") for text in texts]
    out, err = (sys.stdout, sys.stderr) if rank() == 0 else (io.StringIO(),) * 2
    if args.json:
        return JsonOutput(titles, args.sampling.max_tokens, out)
    return TextOutput(titles, out, err)


def _run(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    output: TextOutput | JsonOutput,
) -> int:
    """Continue all prompts together; one that cannot run leaves the others unharmed."""
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        try:
            llm.add_request(prompt, args.sampling, request_id=str(number))
        except ValueError as error:
            output.fail(number, str(error))
    ended: list[RequestOutput] = []
    while llm.has_unfinished_requests():
        for request in llm.step():
            number, [completion] = int(request.request_id), request.outputs
            if completion.error is not None:
                output.fail(number, completion.error)
                continue
            output.show(number, completion)
            ended += [request] if request.finished else []
    seconds, failed = time.perf_counter() - begin, len(prompts) - len(ended)
    generated = sum(len(request.outputs[0].token_ids) for request in ended)
    output.finish(
        {
            "prompts": len(prompts),
            "failed": failed,
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in ended),
            "generated_tokens": generated,
            "seconds": seconds,
            "tokens_per_second": generated / seconds if seconds else 0.0,
        }
    )
    return FAILED if failed else 0
