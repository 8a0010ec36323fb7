"""The command line of rollout_train.py. Names are Megatron's where Megatron has the option."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_flags import add_flags
from absorbed_mla.serving.sampling.parameters import SamplingParams
from console.llm_flags import FLAGS, errors_by_flag
from console.parser import Parser
from rollout.rewards import REWARDS
from training.options import given_options, name_of, own_name_of
from training.refusals import check_files, parse_own

_PROMPTS = (
    "The answer is",
    "def f(x):",
    "import ",
    "Once upon a time",
    "x = ",
    "# ",
    "1 + 1 =",
    "",
)
_DESCRIPTION = "Sample from a live model, score, update, repeat; by torchrun."
# Of options of train.py.
_DEFAULTS = (
    "--train-iters 40 --micro-batch-size 16 --lr 3e-3 --lr-decay-style constant\n"
    "--lr-warmup-iters 3 --weight-decay 0 --seed 1234"
)
_EPILOG = f"""\
Options of the model, parallelism, optimizer, checkpoints and reports are train.py's and mean what
they mean there (train.py --help): --preset, --num-experts, --form, --tensor-model-parallel-size,
--sequence-parallel, --clip-grad, --bf16, --load (its weights), --save (at the end), --metrics
(a line for each step), --plot (rewards and gaps), ... Defaults that are not train.py's:
{_DEFAULTS}
Ranks beyond tensor parallelism sample for other prompts. A token is a byte. The exit code is 1 if
--batch-invariant is given and a log-probability differs between rollout and training."""
# Options of train.py that a rollout does not take, and why.
_REFUSED = {
    "--attention": "the standard attention does not generate",
    "--pipeline-model-parallel-size": "every rank has all layers",
    "--context-parallel-size": "sampled texts are short",
    "--cp-comm-type": "sampled texts are short",
    "--overlap-grad-reduce": "it is a minimal example",
    "--attention-dropout": "the policy that is trained is the one that samples",
    "--hidden-dropout": "the policy that is trained is the one that samples",
    "--fp16": "use --bf16, or fp32 without it",
    "--seq-length": "it follows from the prompts and --num-tokens-to-generate",
    "--global-batch-size": "it is --num-prompts x --group-size",
    "--finetune": "--load takes the weights only",
    "--train-only": "a rollout trains the whole model",
    "--new-indexer": "an indexer that has not learned chooses at random; train it with train.py",
    **dict.fromkeys(("--data", "--split", "--packed"), "the model writes its data"),
    **dict.fromkeys(("--tokenizer", "--trust-remote-code"), "every byte is a token"),
    **dict.fromkeys(("--eval-interval", "--eval-iters"), "rewards are seen in every step"),
    "--log-interval": "every step is printed",
    **dict.fromkeys(("--save-interval", "--exit-interval"), "it saves at the end"),
}


def parse_arguments(argv: list[str], world_size: int) -> argparse.Namespace:
    """Parse and check ``argv``, before any work.

    Args:
        argv: Without the program's name.
        world_size: Number of processes.

    Returns:
        Options of rollout_train.py and of train.py; ``prompts`` as token ids, and ``model``.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    parser = Parser("rollout_train.py", _DESCRIPTION, _EPILOG)
    _add_rollout(parser)
    own, rest = parser.parse_known_args(argv)
    for word in rest:
        flag = word.partition("=")[0]
        if flag in _REFUSED:
            raise ValueError(f"a rollout does not take {flag}: {_REFUSED[flag]}")
    rest = [*_DEFAULTS.split(), *rest]
    check_files(parse_own(rest, "rollout_train.py"))
    _check(own)
    own.prompts = _prompts(own.prompts)
    # Imported late, because it takes seconds.
    from training.arguments import parse_arguments as parse_model
    from training.checks import validate_arguments
    from training.rules import ranges, refuse

    model = parse_model(rest, "rollout_train.py")
    args = argparse.Namespace(**{**vars(model), **vars(own)})
    args.given, args.world_size, args.eval_iters = given_options(argv), world_size, 0
    refuse(ranges(args))
    longest = max(map(len, args.prompts)) + args.num_tokens_to_generate
    # The last token is sampled, not read; sequence parallelism divides the others evenly.
    multiple = args.tensor_parallel_parts or args.tensor_model_parallel_size
    args.seq_length = longest + (-longest) % multiple
    args.global_batch_size = args.num_prompts * args.group_size
    _check_sizes(args, max(1, world_size // args.tensor_model_parallel_size))
    validate_arguments(args)
    return args


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rollout")
    add = group.add_argument
    text = "share of the sampled bytes, or of neighbouring ones, that are so"
    add("--reward", choices=tuple(REWARDS), default="digits", help=text)
    add("--prompts", metavar="FILE", help="one per line (default: some short ones)")
    add("--num-prompts", type=int, default=8, help="prompts of a step, over all ranks")
    add("--group-size", type=int, default=8, help="samples of each prompt")
    add_num_tokens(group, default=16)
    change = {"default": 256, "help": "samples that run at a time"}
    add_flags(group, LLMOptions, ["max_num_seqs"], FLAGS, max_num_seqs=change)
    text = "train on the experts, and keys of sparse attention, that the rollout chose"
    add("--replay", action="store_true", help=text)
    text = "train on packs in which the prompt of a group stands once, not before every sample"
    add("--shared-prefixes", action="store_true", help=text)
    text = "parity mode of the attention: the same bits in the rollout and in training"
    add("--batch-invariant", action="store_true", help=text)
    change = {
        "help": "parts of sums over ranks, for the same bits at other --tensor-model-parallel"
    }
    add_flags(group, LLMOptions, ["tensor_parallel_parts"], tensor_parallel_parts=change)


def add_num_tokens(parser: Any, default: int) -> None:
    """Add ``--num-tokens-to-generate`` to a parser or a group."""
    change = {"default": default, "help": "at most, of a sample"}
    add_flags(parser, SamplingParams, ["max_tokens"], FLAGS, max_tokens=change)


def _check(args: argparse.Namespace) -> None:
    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    with errors_by_flag():
        SamplingParams(max_tokens=args.num_tokens_to_generate)
        LLMOptions(max_num_seqs=args.max_requests)
    if args.tensor_parallel_parts is not None and not args.batch_invariant:
        raise ValueError("--tensor-parallel-parts needs --batch-invariant")
    if args.group_size < 2:
        raise ValueError(
            f"--group-size must be at least 2, to compare samples, got {args.group_size}"
        )
    if args.shared_prefixes and args.replay:
        raise ValueError(
            "--shared-prefixes does not go with --replay: samples of a prompt may have recorded "
            "other choices for it"
        )
    if args.prompts is not None and not Path(args.prompts).is_file():
        raise ValueError(f"--prompts: there is no file {args.prompts}")


def _check_sizes(args: argparse.Namespace, dp: int) -> None:
    """Checks that train.py makes for options that a rollout does not have."""
    if args.num_prompts % dp:
        raise ValueError(
            f"{_shown(args, 'num_prompts')} must be divisible by the {dp} ranks that sample "
            "for different ones (processes / --tensor-model-parallel-size)"
        )
    if args.global_batch_size % (args.micro_batch_size * dp):
        raise ValueError(
            f"{_shown(args, 'num_prompts')} x {_shown(args, 'group_size')} samples must be "
            f"divisible by {_shown(args, 'micro_batch_size')} x {dp} data-parallel ranks"
        )
    longest = args.max_position_embeddings
    if args.seq_length > longest:
        raise ValueError(
            f"the longest prompt and {_shown(args, 'num_tokens_to_generate')} make "
            f"{args.seq_length} tokens, and {name_of(args, 'max_position_embeddings')} allows "
            f"{longest}"
        )


def _shown(args: argparse.Namespace, name: str) -> str:
    """``"--num-prompts 8"``, or ``"the default num_prompts 8"``."""
    return f"{own_name_of(args, name)} {getattr(args, name)}"


def _prompts(path: str | None) -> list[list[int]]:
    """Token ids of the prompts; each begins with the token that ends a text."""
    end = 256
    lines = [p.encode() for p in _PROMPTS] if path is None else Path(path).read_bytes().splitlines()
    if not lines:
        raise ValueError(f"--prompts: there is no prompt in {path}")
    return [[end, *line] for line in lines]
