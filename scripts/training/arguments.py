"""The command line. Names are Megatron's where Megatron has the option."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from absorbed_mla.options import CP_COMM_TYPES, DOWN_PROJECTIONS, FORMS
from console.parser import Parser
from training.model_options import MODEL_OPTIONS
from training.options_named import given_options
from training.presets import PRESETS

DECAY_STYLES = ("constant", "cosine", "linear")
_MODEL_DEFAULTS = {"preset": "tiny", "scale_down": 1, "make_vocab_size_divisible_by": 64}
# What --use-checkpoint-args says instead.
_OF_THE_CHECKPOINT = (
    *_MODEL_DEFAULTS,
    "vocab_size",
    "moe_layer_freq",
    *(option.name for option in MODEL_OPTIONS if option.in_checkpoint),
)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse ``argv``; nothing is checked beyond types, choices and what excludes each other.

    Raises:
        ValueError: If an option is unknown, has no such value, or excludes another.
    """
    parser = Parser(
        "train.py", "Train a GPT with (absorbed) multi-head latent attention, by torchrun."
    )
    for add in (
        _add_model,
        _add_attention,
        _add_moe,
        _add_parallel,
        _add_training,
        _add_data,
        _add_io,
    ):
        add(parser)
    args = parser.parse_args(argv)
    args.given = given_options(argv)
    if args.use_checkpoint_args:
        _check_checkpoint_args(args)
    for name, default in _MODEL_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def _check_checkpoint_args(args: argparse.Namespace) -> None:
    if not args.load:
        raise ValueError("--use-checkpoint-args needs --load, the checkpoint to take them from")
    given = [name for name in _OF_THE_CHECKPOINT if getattr(args, name) is not None]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(
            f"--use-checkpoint-args takes the model from --load and excludes {flags}; "
            f"leave out the one or the other"
        )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add(
        "--use-checkpoint-args",
        action="store_true",
        help="take the model from the checkpoint in --load, and not from the options below",
    )
    add("--preset", help=f"the model: one of {', '.join(PRESETS)} (default: tiny)")
    add("--scale-down", type=int, metavar="N", help="divide the preset's sizes by N (default: 1)")
    add(
        "--vocab-size",
        type=int,
        help="rows of the embedding, before padding (default: the tokenizer's; a released model's "
        "own at its real size)",
    )
    _add_model_options(add, "model")
    add(
        "--make-vocab-size-divisible-by",
        type=int,
        metavar="N",
        help="pad the embedding to a multiple of N rows (default: 64)",
    )
    add("--init-method-std", type=float, default=0.02, help="deviation of the first weights")
    add("--attention-dropout", type=float, default=0.0, help="of the attention's probabilities")
    add("--hidden-dropout", type=float, default=0.0, help="of what layers add to the residual")


def _add_model_options(add: Callable, group: str) -> None:
    for option in MODEL_OPTIONS:
        if option.group == group:
            text = f"{option.help} (default: the preset's)"
            add(option.flag, type=option.kind, choices=option.choices, help=text)


def _add_attention(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("attention").add_argument
    add(
        "--attention",
        choices=("absorbed", "standard"),
        default="absorbed",
        help="standard is Megatron's own MLASelfAttention, to compare with",
    )
    add("--form", choices=FORMS, default="auto", help="how absorbed MLA is executed")
    add(
        "--down-projection",
        choices=DOWN_PROJECTIONS,
        default="duplicated",
        help="whether every tensor-parallel rank keeps them whole",
    )
    _add_model_options(add, "attention")
    add(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        help="whose layers (default: transformer_engine where it is installed and a GPU is there, "
        "else local)",
    )


def _add_moe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("mixture of experts").add_argument
    add(
        "--moe-layer-freq",
        metavar="N|LIST",
        help="layers with experts: every N-th, or a list like ([0]*1+[1]*2) (default: the "
        "preset's first layers are dense)",
    )
    _add_model_options(add, "mixture of experts")
    add(
        "--moe-token-dispatcher-type",
        choices=("allgather", "alltoall"),
        help="how tokens reach their experts (default: alltoall on a GPU; only allgather works "
        "without)",
    )
    add("--moe-grouped-gemm", action="store_true", help="all experts in one product; GPU only")


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("parallelism and recomputation").add_argument
    for name, text in (
        ("tensor-model", "ranks that heads and widths are cut over"),
        ("pipeline-model", "ranks that the layers are cut over"),
        ("expert-model", "ranks that the experts are cut over"),
        ("context", "ranks that each sequence is cut over, an early and a late chunk for each"),
    ):
        add(f"--{name}-parallel-size", type=int, default=1, metavar="N", help=text)
    add(
        "--cp-comm-type",
        nargs="+",
        default=["all_gather"],
        metavar="TYPE",
        help=f"how context-parallel ranks exchange latents: {' or '.join(CP_COMM_TYPES)}, one for "
        "all layers or one for each layer (default: all_gather)",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="cut tokens over the tensor-parallel ranks between layers",
    )
    add("--overlap-grad-reduce", action="store_true", help="sum gradients during the backward")
    add(
        "--recompute-granularity",
        choices=("selective", "full"),
        help="compute parts again in the backward instead of keeping them",
    )
    add(
        "--recompute-modules",
        nargs="+",
        metavar="MODULE",
        help="for selective: core_attn, mla_up_proj, mlp, moe, ... (default: core_attn)",
    )
    add(
        "--recompute-method",
        choices=("uniform", "block"),
        help="for full: all layers in groups, or the first of each pipeline stage",
    )
    add("--recompute-num-layers", type=int, metavar="N", help="for full: layers of a group")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--seq-length", type=int, default=128, help="tokens of a sequence")
    add("--micro-batch-size", type=int, help="sequences of a forward (default: 8, packed: 1)")
    add(
        "--global-batch-size",
        type=int,
        help="sequences of an update (default: one micro-batch per data-parallel rank)",
    )
    add("--train-iters", type=int, default=200, help="updates of the run")
    add("--exit-interval", type=int, metavar="N", help="save and stop at a multiple of N")
    add("--lr", type=float, default=2e-3, help="the highest learning rate")
    add("--min-lr", type=float, help="the last learning rate (default: a tenth of --lr)")
    add("--lr-warmup-iters", type=int, default=10, help="updates until --lr is reached")
    add("--lr-decay-iters", type=int, help="updates until --min-lr (default: --train-iters)")
    add("--lr-decay-style", choices=DECAY_STYLES, default="cosine", help="between the two")
    add("--weight-decay", type=float, default=0.1, help="AdamW's")
    add("--adam-beta1", type=float, default=0.9, help="decay of the gradients' mean")
    add("--adam-beta2", type=float, default=0.95, help="decay of the squared gradients' mean")
    add("--adam-eps", type=float, default=1e-8, help="added to the root of the latter")
    add("--clip-grad", type=float, default=1.0, help="largest gradient norm, 0 for any")
    add("--seed", type=int, default=1234, help="of weights, data order and dropout")
    precision = group.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true", help="compute in bf16 instead of fp32")
    precision.add_argument("--fp16", action="store_true", help="compute in fp16; GPU only")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        metavar="PATH",
        help="text file or folder (default: the standard library's sources)",
    )
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="Hugging Face tokenizer (default: every byte is a token)",
    )
    add("--split", default="95,5", help="percent for training, for validation")
    add("--packed", action="store_true", help="every document its own sequence (thd), batch of 1")


def _add_io(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints, validation and reports").add_argument
    add("--load", metavar="FOLDER", help="checkpoint to resume, or weights to start from")
    add("--finetune", action="store_true", help="take only the weights of --load and start at 0")
    add("--save", metavar="FOLDER", help="where checkpoints go (default: none are written)")
    add(
        "--save-interval",
        type=int,
        metavar="N",
        help="save every N updates, too (default: at the end only)",
    )
    add("--eval-interval", type=int, default=100, metavar="N", help="validate every N updates")
    add("--eval-iters", type=int, default=4, help="batches of a validation, 0 for none")
    add("--log-interval", type=int, default=10, metavar="N", help="print every N-th update")
    add("--metrics", metavar="FILE", help="JSON lines, one per update")
    add("--plot", metavar="FILE", help="PNG of the losses")
    add(
        "--compare-metrics",
        metavar="FILE",
        help="another run's --metrics, shown beside this run's at the end and in the plot",
    )
    add("--no-progress", action="store_true", help="no progress bar")
