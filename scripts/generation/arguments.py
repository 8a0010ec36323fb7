"""The command line of generate.py. Names are Megatron's where Megatron has the option."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.sampling.parameters import SamplingParams
from console.parser import Parser
from training import arguments as trainer
from training.options_named import given_options
from training.presets import ModelPreset

# Options of train.py that say how the model is computed, and, where a checkpoint does not describe
# its model, what it is.
_MODEL_FLAGS = {
    "--" + name.replace("_", "-")
    for name in (
        *("bf16", "fp16", "form", "down_projection", "sequence_parallel"),
        *("transformer_impl", "moe_token_dispatcher_type", "moe_grouped_gemm"),
        *(field.name for field in dataclasses.fields(ModelPreset)),
        *("preset", "scale_down", "use_checkpoint_args", "make_vocab_size_divisible_by"),
        *("num_experts", "norm_epsilon", "latent_norm_epsilon"),
    )
}
_DESCRIPTION = """\
Generate text with a model of (absorbed) multi-head latent attention, by torchrun: every process is
a tensor-parallel rank."""
_EPILOG = """\
These options of train.py mean what they mean there (train.py --help): --bf16, --fp16, --form,
--down-projection, --sequence-parallel, --transformer-impl, --moe-token-dispatcher-type and
--moe-grouped-gemm; and, for a checkpoint that does not describe its model, --preset and single
sizes such as --num-layers."""
# By the names in errors of LLM, SamplingParams and AbsorbedMLAOptions.
_OPTIONS = {
    "tokenizer": "--tokenizer",
    "form": "--form",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "tensor_parallel_size": "--tensor-model-parallel-size",
    "max_model_len": "--max-sequence-length",
    "max_num_seqs": "--max-requests",
    "max_num_batched_tokens": "--step-tokens",
    "cache_tokens": "--cache-tokens",
}


def parse_arguments(argv: list[str], world_size: int) -> argparse.Namespace:
    """Parse and check ``argv``; nothing is read but the command line.

    Args:
        argv: Without the program's name.
        world_size: Number of processes.

    Returns:
        All options of generate.py, and the defaults of train.py's others; ``sampling`` as
        ``SamplingParams``, ``attention_options`` as ``AbsorbedMLAOptions``, and options of ``LLM``
        in ``llm``.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    own, of_model = _parser().parse_known_args(argv)
    for word in of_model:
        if word.startswith("--") and word.partition("=")[0] not in _MODEL_FLAGS:
            raise ValueError(f"unrecognized arguments: {word} (--help lists all options)")
    if not any(word.partition("=")[0] == "--preset" for word in of_model):
        of_model = [*of_model, "--use-checkpoint-args"]
    model = trainer.parse_arguments([*of_model, "--load", own.load])
    args = argparse.Namespace(**{**vars(model), **vars(own)})
    args.given = given_options(argv)
    if args.tensor_model_parallel_size is None:
        args.tensor_model_parallel_size = world_size
    _check(args, world_size)
    with errors_by_option():
        args.attention_options = AbsorbedMLAOptions(
            form=args.form,
            down_projection=args.down_projection,
            batch_invariant=args.batch_invariant,
        )
        args.sampling = SamplingParams(
            max_tokens=args.num_tokens_to_generate,
            temperature=0 if args.greedy else args.temperature,
            top_k=args.top_k,
            top_p=args.top_p or 1.0,
            ignore_eos=args.ignore_eos,
            logprobs=0 if args.return_log_probs else None,
        )
        args.llm = {
            "max_model_len": args.max_sequence_length,
            "max_num_seqs": args.max_requests,
            "max_num_batched_tokens": args.step_tokens,
            "cache_tokens": args.cache_tokens,
            "enable_chunked_prefill": not args.no_chunked_prefill,
            "enable_prefix_caching": not args.no_prefix_caching,
            "cuda_graphs": args.cuda_graphs,
            "seed": args.seed,
        }
        # For its checks.
        LLMOptions(**args.llm, tensor_parallel_size=args.tensor_model_parallel_size)
    return args


@contextlib.contextmanager
def errors_by_option() -> Iterator[None]:
    """Lets errors of the package name the options of this command line."""
    try:
        yield
    except ValueError as error:
        text = re.sub(r"^\w+|\w+_\w+", lambda word: _OPTIONS.get(word[0], word[0]), str(error))
        raise ValueError(text) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser("generate.py", _DESCRIPTION, _EPILOG)
    for add in (_add_model, _add_prompts, _add_sampling, _add_engine, _add_output):
        add(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--load",
        metavar="FOLDER",
        required=True,
        help="checkpoint of train.py or of the conversion, or a folder of them",
    )
    add("--tokenizer", metavar="FOLDER", help="Hugging Face tokenizer (default: bytes)")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code of the tokenizer's folder, if the tokenizer needs it",
    )
    add(
        "--tensor-model-parallel-size",
        type=int,
        metavar="N",
        help="ranks of the model (default: the number of processes, which it must be)",
    )
    add(
        "--batch-invariant",
        action="store_true",
        help="parity mode: the same bits whatever else runs, in chunks or at once; slower",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts", "From stdin, one per line, unless given here.")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue, several times if wanted",
    )
    source.add_argument("--prompt-file", metavar="FILE", help="prompts, one per line")
    group.add_argument(
        "--add-bos",
        action="store_true",
        help="begin every prompt with the tokenizer's token for that",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--num-tokens-to-generate", type=int, default=128, metavar="N", help="at most, per prompt")
    add("--greedy", action="store_true", help="always the likeliest token")
    for flag, kind, default, text in (
        ("--temperature", float, 1.0, "divides the logits; 0: as --greedy"),
        ("--top-k", int, 0, "sample from so many of the likeliest tokens; 0: from all"),
        ("--top-p", float, 0.0, "from the likeliest that make up this much; 0: from all"),
        ("--seed", int, 1234, "the same prompts and options give the same text"),
    ):
        add(flag, type=kind, default=default, metavar="X", help=text)
    add("--ignore-eos", action="store_true", help="go on after the end-of-document token")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    for flag, default, text in (
        (
            "--max-sequence-length",
            None,
            "tokens of a prompt and its continuation (default: what the prompts need, at most the "
            "model's --max-position-embeddings)",
        ),
        ("--max-requests", 64, "prompts at a time; others wait"),
        (
            "--cache-tokens",
            None,
            "tokens that the latent cache holds, over all prompts; if it fills up, some wait and "
            "are computed again (default: what those that run at a time need)",
        ),
        ("--step-tokens", 2048, "tokens of a forward beside those of prompts that were read"),
    ):
        add(flag, type=int, default=default, metavar="N", help=text)
    for flag, text in (
        ("--no-chunked-prefill", "refuse prompts longer than a forward"),
        ("--no-prefix-caching", "compute equal beginnings of prompts twice"),
        (
            "--cuda-graphs",
            "GPU only: capture steps in CUDA graphs, those that decode before the first one runs, "
            "those that read prompts when one of their size does",
        ),
    ):
        add(flag, action="store_true", help=text)


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="a JSON object per prompt as it ends, and of totals")
    add(
        "--return-log-probs",
        action="store_true",
        help="with --json: log-probabilities of the generated tokens, before temperature",
    )


def _check(args: argparse.Namespace, world_size: int) -> None:
    for name, least in (("num_tokens_to_generate", 1), ("seed", 0)):
        if getattr(args, name) < least:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least {least}, got {getattr(args, name)}")
    tp = args.tensor_model_parallel_size
    if tp != world_size:
        raise ValueError(
            f"--tensor-model-parallel-size must be the number of processes (torchrun "
            f"--nproc-per-node) {world_size}, got {tp}"
        )
    if args.sequence_parallel and tp == 1:
        raise ValueError("--sequence-parallel needs more than one process")
    if args.greedy and (args.temperature not in (0, 1) or args.top_k or args.top_p):
        raise ValueError("--greedy excludes --temperature, --top-k and --top-p")
    if args.return_log_probs and not args.json:
        raise ValueError("--return-log-probs needs --json")
    if args.prompt_file is not None and not Path(args.prompt_file).is_file():
        raise ValueError(f"--prompt-file: there is no file {args.prompt_file}")
