"""The command line of generate.py. Names are Megatron's where Megatron has the option."""

from __future__ import annotations

import argparse
from pathlib import Path

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_flags import add_flags, given_options
from absorbed_mla.serving.option_schema import options_of
from absorbed_mla.serving.options import ModelFields
from absorbed_mla.serving.sampling.parameters import SamplingParams
from console.llm_flags import FLAGS, errors_by_flag
from console.parser import Parser
from training import options as training_options
from training.presets import COMMON

# Options of train.py that say how the model is computed, and, where a checkpoint does not describe
# its model, what it is.
_MODEL_FLAGS = {
    training_options.flag_of(name)
    for name in (
        *("bf16", "fp16", "form", "down_projection", "sequence_parallel"),
        *("transformer_impl", "moe_token_dispatcher_type", "moe_grouped_gemm"),
        *COMMON,
        *("preset", "scale_down", "use_checkpoint_args", "make_vocab_size_divisible_by"),
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
# Options of LLM for live models that it does not take: the cache is as large as the prompts need,
# log-probabilities of prompts are not shown, and models of train.py have no MTP layer.
_NOT_TAKEN = {"gpu_memory_utilization", "prompt_logprobs", "num_speculative_tokens"}
_LLM = [
    name
    for name in options_of(LLMOptions)
    if name not in options_of(ModelFields) and name not in _NOT_TAKEN
]
_SAMPLING = ["max_tokens", "temperature", "top_k", "top_p", "ignore_eos"]


def parse_arguments(argv: list[str], world_size: int) -> argparse.Namespace:
    """Parse and check ``argv``; nothing is read but the command line.

    Args:
        argv: Without the program's name.
        world_size: Number of processes.

    Returns:
        All options of generate.py, and those of the model, unparsed, in ``of_model``; ``sampling``
        as ``SamplingParams``, ``attention_options`` as ``AbsorbedMLAOptions``, and options of
        ``LLM`` in ``llm``.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    own, of_model = _parser().parse_known_args(argv)
    for word in of_model:
        if word.startswith("--") and word.partition("=")[0] not in _MODEL_FLAGS:
            raise ValueError(f"unrecognized arguments: {word} (--help lists all options)")
    if not any(word.partition("=")[0] == "--preset" for word in of_model):
        of_model = [*of_model, "--use-checkpoint-args"]
    args = training_options.own_parser("generate.py").parse_known_args(of_model, own)[0]
    args.of_model = [*of_model, "--load", own.load]
    args.given = training_options.given_options(argv)
    if args.tensor_model_parallel_size is None:
        args.tensor_model_parallel_size = world_size
    _check(args, world_size)
    with errors_by_flag():
        args.attention_options = AbsorbedMLAOptions(
            form=args.form,
            down_projection=args.down_projection,
            batch_invariant=args.batch_invariant,
        )
        given = given_options(own, SamplingParams, _SAMPLING, FLAGS)
        given |= {"temperature": 0} if args.greedy else {}
        given["top_p"] = args.top_p or 1.0
        args.sampling = SamplingParams(**given, logprobs=0 if args.return_log_probs else None)
        args.llm = given_options(own, LLMOptions, _LLM, FLAGS)
        # For its checks.
        LLMOptions(**args.llm, tensor_parallel_size=args.tensor_model_parallel_size)
    return args


def with_model(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with those of the model, Megatron's under their names; reads a checkpoint.

    Raises:
        ValueError: If the model is not described, or sizes do not fit each other.
    """
    # Imported late, because it takes seconds.
    from training import arguments as trainer

    model = trainer.parse_arguments(args.of_model, "generate.py")
    # Megatron looks at it, and nothing else does.
    model.seq_length = model.max_position_embeddings
    return argparse.Namespace(**{**vars(model), **vars(args)})


def _parser() -> argparse.ArgumentParser:
    parser = Parser("generate.py", _DESCRIPTION, _EPILOG)
    for add in (_add_model, _add_prompts, _add_sampling, _add_engine, _add_output):
        add(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    text = "checkpoint of train.py or of the conversion, or a folder of them"
    add("--load", metavar="FOLDER", required=True, help=text)
    add("--tokenizer", metavar="FOLDER", help="Hugging Face tokenizer (default: bytes)")
    add_flags(group, LLMOptions, ["trust_remote_code"])
    text = "ranks of the model (default: the number of processes, which it must be)"
    add("--tensor-model-parallel-size", type=int, metavar="N", help=text)
    text = "parity mode: the same bits whatever else runs, in chunks or at once; slower"
    add("--batch-invariant", action="store_true", help=text)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts", "From stdin, one per line, unless given here.")
    add = group.add_mutually_exclusive_group().add_argument
    text = "text to continue, several times if wanted"
    add("--prompt", action="append", metavar="TEXT", help=text)
    add("--prompt-file", metavar="FILE", help="prompts, one per line")
    text = "begin every prompt with the tokenizer's token for that"
    group.add_argument("--add-bos", action="store_true", help=text)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--greedy", action="store_true", help="always the likeliest token")
    changes = {
        "max_tokens": {"default": 128, "help": "at most, per prompt"},
        "top_p": {"default": 0.0, "help": "from the likeliest that make up this much; 0: from all"},
    }
    add_flags(group, SamplingParams, _SAMPLING, FLAGS, **changes)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    changes = {
        "max_model_len": {
            "help": "tokens of a prompt and its continuation (default: what the prompts need, at "
            "most the model's --max-position-embeddings)"
        },
        "cache_tokens": {
            "help": "tokens that the latent cache holds, over all prompts; if it fills up, some "
            "wait and are computed again (default: what those that run at a time need)"
        },
        "seed": {"default": 1234, "help": "the same prompts and options give the same text"},
    }
    names = [name for name in _LLM if name != "trust_remote_code"]
    add_flags(parser.add_argument_group("engine"), LLMOptions, names, FLAGS, **changes)


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="a JSON object per prompt as it ends, and of totals")
    text = "with --json: log-probabilities of the generated tokens, before temperature"
    add("--return-log-probs", action="store_true", help=text)


def _check(args: argparse.Namespace, world_size: int) -> None:
    if args.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {args.seed}")
    tp = args.tensor_model_parallel_size
    if tp != world_size:
        raise ValueError(
            f"--tensor-model-parallel-size must be the number of processes (torchrun "
            f"--nproc-per-node) {world_size}, got {tp}"
        )
    if "--sequence-parallel" in args.given and tp == 1:
        raise ValueError("--sequence-parallel needs more than one process")
    if args.greedy and (args.temperature not in (0, 1) or args.top_k or args.top_p):
        raise ValueError("--greedy excludes --temperature, --top-k and --top-p")
    if args.return_log_probs and not args.json:
        raise ValueError("--return-log-probs needs --json")
    if args.prompt_file is not None and not Path(args.prompt_file).is_file():
        raise ValueError(f"--prompt-file: there is no file {args.prompt_file}")
