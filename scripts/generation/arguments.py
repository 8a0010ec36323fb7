"""The command line of generate.py. Names are Megatron's where Megatron has the option."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from absorbed_mla.generation.sampling import SamplingParams
from absorbed_mla.options import (
    CORE_ATTENTION_BACKENDS,
    DOWN_PROJECTIONS,
    FORMS,
    PAGED_ATTENTION_BACKENDS,
    AbsorbedMLAOptions,
)
from console.parser import Parser
from training import arguments as trainer
from training.options_named import given_options
from training.presets import ModelPreset

_DEFAULTS = AbsorbedMLAOptions()
# Options of train.py that describe the model of a checkpoint that does not describe itself.
_MODEL_FLAGS = {
    "--" + name.replace("_", "-")
    for name in (
        *(field.name for field in dataclasses.fields(ModelPreset)),
        *("preset", "scale_down", "use_checkpoint_args", "make_vocab_size_divisible_by"),
        *("num_experts", "norm_epsilon", "latent_norm_epsilon"),
        *("transformer_impl", "moe_token_dispatcher_type", "moe_grouped_gemm"),
    )
}
_DESCRIPTION = """\
Generate text with a model of (absorbed) multi-head latent attention, by torchrun: every process is
a tensor-parallel rank."""
_EPILOG = """\
A checkpoint that does not describe its model needs train.py's --preset and, where they differ,
single sizes such as --num-layers; train.py --help lists them. They and --transformer-impl,
--moe-token-dispatcher-type and --moe-grouped-gemm mean here what they mean there."""
_AT_LEAST_ONE = (
    "tensor_model_parallel_size",
    "max_sequence_length",
    "max_requests",
    "cache_tokens",
    "step_tokens",
)


def parse_arguments(argv: list[str], world_size: int) -> argparse.Namespace:
    """Parse and check ``argv``; nothing is read but the command line.

    Args:
        argv: Without the program's name.
        world_size: Number of processes.

    Returns:
        All options of generate.py, and the defaults of train.py's others; ``sampling`` as
        ``SamplingParams`` without a stop token, and ``options`` as ``AbsorbedMLAOptions``.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    own, of_model = _parser().parse_known_args(argv)
    for word in of_model:
        if not word.startswith("--") or word.partition("=")[0] in _MODEL_FLAGS:
            continue
        raise ValueError(f"unrecognized arguments: {word} (--help lists all options)")
    if not any(word.partition("=")[0] == "--preset" for word in of_model):
        of_model = [*of_model, "--use-checkpoint-args"]
    model = trainer.parse_arguments([*of_model, "--load", own.load])
    args = argparse.Namespace(**{**vars(model), **vars(own)})
    args.given = given_options(argv)
    if args.tensor_model_parallel_size is None:
        args.tensor_model_parallel_size = world_size
    _check(args, world_size)
    args.sampling = _sampling(args)
    args.options = _attention(args)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = Parser("generate.py", _DESCRIPTION, _EPILOG)
    for add in (_add_model, _add_prompts, _add_sampling, _add_engine, _add_attention, _add_output):
        add(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--load",
        metavar="FOLDER",
        required=True,
        help="checkpoint of train.py or of the conversion, or a folder of them",
    )
    group.add_argument(
        "--tokenizer", metavar="FOLDER", help="Hugging Face tokenizer (default: bytes)"
    )
    precision = group.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true", help="compute in bf16 instead of fp32")
    precision.add_argument("--fp16", action="store_true", help="compute in fp16; GPU only")
    group.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        metavar="N",
        help="ranks of the model (default: the number of processes, which it must be)",
    )
    group.add_argument(
        "--sequence-parallel", action="store_true", help="cut tokens over the ranks between layers"
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
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--num-tokens-to-generate", type=int, default=128, metavar="N", help="at most, per prompt"
    )
    for flag, kind, default, text in (
        ("--temperature", float, 1.0, "divides the logits"),
        ("--top-k", int, 0, "sample from so many of the likeliest tokens; 0: from all"),
        ("--top-p", float, 0.0, "from the likeliest that make up this much; 0: from all"),
        ("--seed", int, 1234, "the same prompts and options give the same text"),
    ):
        group.add_argument(flag, type=kind, default=default, metavar="X", help=text)
    group.add_argument("--greedy", action="store_true", help="always the likeliest token")
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-document token"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-sequence-length",
        type=int,
        metavar="N",
        help="tokens of a prompt and its continuation (default: what the prompts need, at most "
        "the model's --max-position-embeddings)",
    )
    group.add_argument(
        "--max-requests", type=int, default=64, metavar="N", help="prompts at a time; others wait"
    )
    group.add_argument(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="tokens that the latent cache holds, over all prompts; if it fills up, some wait and "
        "are computed again (default: what those that run at a time need)",
    )
    group.add_argument(
        "--step-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of a forward, rounded up to 64",
    )
    group.add_argument(
        "--no-chunked-prefill", action="store_true", help="refuse prompts above --step-tokens"
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="compute equal beginnings of prompts twice"
    )
    group.add_argument(
        "--cuda-graphs",
        action="store_true",
        help="GPU only: capture layers in CUDA graphs before the first step, and replay them in "
        "steps of up to 512 tokens, which run absorbed",
    )


def _add_attention(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("attention")
    group.add_argument(
        "--form", choices=FORMS, default=_DEFAULTS.form, help="how absorbed MLA is executed"
    )
    group.add_argument(
        "--down-projection",
        choices=DOWN_PROJECTIONS,
        default=_DEFAULTS.down_projection,
        help="whether every rank keeps the down-projections whole",
    )
    group.add_argument(
        "--paged-attention-backend",
        choices=PAGED_ATTENTION_BACKENDS,
        default=_DEFAULTS.paged_attention_backend,
        help="attention of the absorbed form, over the cache",
    )
    group.add_argument(
        "--core-attention-backend",
        choices=CORE_ATTENTION_BACKENDS,
        default=_DEFAULTS.core_attention_backend,
        help="attention of the expanded form",
    )
    group.add_argument(
        "--context-chunk-size",
        type=int,
        default=_DEFAULTS.context_chunk_size,
        metavar="N",
        help="cached tokens that the expanded form expands at a time",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same bits whatever else runs, in chunks or at once; slower",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        action="store_true",
        help="a JSON object per prompt as it ends, and one about all of them",
    )
    group.add_argument(
        "--return-log-probs",
        action="store_true",
        help="with --json: log-probabilities of the generated tokens, before temperature",
    )


def _check(args: argparse.Namespace, world_size: int) -> None:
    for name in _AT_LEAST_ONE:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {args.seed}")
    tp = args.tensor_model_parallel_size
    if tp != world_size:
        raise ValueError(
            f"--tensor-model-parallel-size must be the number of processes (torchrun "
            f"--nproc-per-node) {world_size}, got {tp}"
        )
    if args.sequence_parallel and tp == 1:
        raise ValueError("--sequence-parallel needs more than one process")
    if args.return_log_probs and not args.json:
        raise ValueError("--return-log-probs needs --json")
    if args.prompt_file is not None and not Path(args.prompt_file).is_file():
        raise ValueError(f"--prompt-file: there is no file {args.prompt_file}")


def _attention(args: argparse.Namespace) -> AbsorbedMLAOptions:
    names = [name for name in vars(_DEFAULTS) if name != "latent_norm_eps" and hasattr(args, name)]
    try:
        return AbsorbedMLAOptions(**{name: getattr(args, name) for name in names})
    except ValueError as error:
        raise ValueError(_with_flags(str(error), names)) from error


def _with_flags(text: str, names: Iterable[str]) -> str:
    """``text`` with option names in place of the field names that they set."""
    for name in names:
        text = re.sub(rf"\b{name}\b", "--" + name.replace("_", "-"), text)
    return text


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """Sampling parameters; errors name the options of the command line."""
    given = args.temperature != 1.0 or args.top_k or args.top_p
    if args.greedy and given:
        raise ValueError("--greedy excludes --temperature, --top-k and --top-p")
    if args.num_tokens_to_generate < 1:
        raise ValueError(
            f"--num-tokens-to-generate must be at least 1, got {args.num_tokens_to_generate}"
        )
    try:
        return SamplingParams(
            num_tokens=args.num_tokens_to_generate,
            temperature=args.temperature,
            top_k=1 if args.greedy else args.top_k,
            top_p=args.top_p,
            log_probs=args.return_log_probs,
        )
    except ValueError as error:
        names = ("temperature", "top_k", "top_p")
        raise ValueError(_with_flags(str(error), names)) from error
