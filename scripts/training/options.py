"""The options of train.py that Megatron does not have, and its help."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from absorbed_mla.lora.config import LoRAConfig
from absorbed_mla.lora.targets import ALL_LINEAR
from absorbed_mla.options import DOWN_PROJECTIONS, FORMS
from console.parser import Parser
from training.presets import PRESETS

# Megatron's options with a default of ours.
DEFAULTS: dict[str, object] = {
    "seq_length": 128,
    "train_iters": 200,
    "lr": 2e-3,
    "lr_warmup_iters": 10,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "make_vocab_size_divisible_by": 64,
    "cp_comm_type": ["all_gather"],
    "split": "95,5",
    "eval_interval": 100,
    "eval_iters": 4,
    "log_interval": 10,
}
_EPILOG = """\
All else are Megatron's arguments, of any part of its loop; --help-megatron lists them. Often used:
  the model        --num-layers --hidden-size --num-experts ... instead of the preset's value
  parallelism      --tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size
                   --context-parallel-size --cp-comm-type --expert-model-parallel-size
  batches          --seq-length --micro-batch-size --global-batch-size --train-iters
  optimizer        --lr --min-lr --lr-warmup-iters --lr-decay-style --weight-decay --clip-grad
                   --optimizer (adam, muon, ...) --qk-clip --log-max-attention-logit
  precision        --bf16 --fp16 --fp8-format --fp8-recipe --transformer-impl
  memory           --recompute-granularity --recompute-modules --use-distributed-optimizer
  checkpoints      --load --save --save-interval --finetune --use-checkpoint-args --exit-interval
  reports          --eval-interval --eval-iters --log-interval
Defaults that are not Megatron's:
{}
--micro-batch-size is 8 (packed: 1), --global-batch-size that x data-parallel ranks x pipeline
stages, --min-lr a tenth of --lr, --lr-decay-iters --train-iters, --save-interval --train-iters."""
_SWITCHES = (
    ("dsa_indexer_rope_interleaved", "rotate neighbouring channels of the indexer (GLM-5)"),
    ("dsa_indexer_rotate_activation", "multiply its queries and keys by the Hadamard matrix"),
    ("dsa_indexer_scoring_relu", "pass the products of the indexer through a ReLU"),
)
# Options of the model that have the name of no argument of Megatron's.
_FLAGS = {"layernorm_epsilon": "--norm-epsilon", "fp8": "--fp8-format"}


def own_parser(script: str = "train.py") -> argparse.ArgumentParser:
    """A parser of our own options, whose help tells of Megatron's."""
    shown = [f"{flag_of(name)} {_words(value)}" for name, value in DEFAULTS.items()]
    rows = [shown[i : i + 3] for i in range(0, len(shown), 3)]
    table = "\n".join("  " + "".join(f"{x:<34}" for x in row).rstrip() for row in rows)
    text = "Train a GPT with multi-head latent attention through Megatron's loop; by torchrun."
    parser = Parser(script, text, _EPILOG.format(table))
    add_options(parser)
    return parser


def _words(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our own options, in groups."""
    parser.add_argument(
        "--help-megatron", action="store_true", help="list Megatron's arguments (default: off)"
    )
    _add_model(parser.add_argument_group("model").add_argument)
    _add_indexer(parser.add_argument_group("sparse attention (DSA)").add_argument)
    _add_lora(parser.add_argument_group("LoRA of the attention").add_argument)
    add = parser.add_argument_group("data").add_argument
    text = "text file, or folder of them (default: the sources of Python's standard library)"
    add("--data", metavar="PATH", help=text)
    text = "Hugging Face tokenizer (default: every byte is a token)"
    add("--tokenizer", metavar="FOLDER", help=text)
    text = "make each document a sequence of its own, packed as thd"
    add("--packed", action="store_true", help=text)
    add = parser.add_argument_group("reports").add_argument
    add("--metrics", metavar="FILE", help="write one JSON line per iteration to this file")
    add("--plot", metavar="FILE", help="draw the losses into this PNG")


def _add_model(add) -> None:
    add("--preset", default="tiny", help=f"the model: {', '.join(PRESETS)}")
    text = (
        "divide the widths, layers and experts of the preset by N, and the top-k of an indexer, "
        "which becomes at most a quarter of --seq-length"
    )
    add("--scale-down", type=int, default=1, metavar="N", help=text)
    text = "epsilon of the RMS norms inside the attention (default: the preset's)"
    add("--latent-norm-epsilon", type=float, metavar="X", help=text)
    text = "absorbed: this package's; standard: Megatron's MLASelfAttention, to compare with"
    add("--attention", choices=("absorbed", "standard"), default="absorbed", help=text)
    text = "form in which absorbed MLA is computed; auto: the one estimated to be fastest"
    add("--form", choices=FORMS, default="auto", help=text)
    text = "whether tensor-parallel ranks hold copies of the down-projections or split them"
    add("--down-projection", choices=DOWN_PROJECTIONS, default="duplicated", help=text)


def _add_indexer(add) -> None:
    add(
        "--experimental-attention-variant",
        choices=("dsa", "none"),
        help="dsa: an indexer of --dsa-indexer-n-heads, --dsa-indexer-head-dim, ... chooses the "
        "--dsa-indexer-topk keys that a query attends to (default: the preset's)",
    )
    for name, text in _SWITCHES:
        switch = argparse.BooleanOptionalAction
        add(flag_of(name), action=switch, help=f"{text} (default: the preset's)")
    add(
        "--dsa-indexer-use-sparse-loss",
        action=argparse.BooleanOptionalAction,
        help="compare the indexer with the attention over the chosen keys, not over all that a "
        "query sees (default: on, and off with --train-only)",
    )
    add(
        "--train-only",
        choices=("indexer",),
        help="the warm-up of a new indexer: no other parameter changes, and the attention is over "
        "all keys (default: all parameters are trained)",
    )
    add(
        "--new-indexer",
        action="store_true",
        help="take the weights of a dense model from --load, as --finetune does, and give it an "
        "indexer with initial weights",
    )


def _add_lora(add) -> None:
    text = "train matrices of this rank beside frozen weights (default: all weights are trained)"
    add("--lora-rank", type=int, metavar="R", help=text)
    text = "their product is multiplied by X / R (default: R)"
    add("--lora-alpha", type=float, metavar="X", help=text)
    text = "names of layers, Megatron's or Hugging Face's (default: every linear one)"
    add("--lora-target-modules", nargs="+", metavar="NAME", help=text)
    text = "adapter in PEFT's format to begin with, instead of the three options above"
    add("--lora-adapter", metavar="FOLDER", help=text)
    text = "write the adapter there in PEFT's format at the end"
    add("--save-adapter", metavar="FOLDER", help=text)


def lora_config(args: argparse.Namespace) -> LoRAConfig:
    """LoRA of a command line with ``--lora-rank``.

    Raises:
        ValueError: Naming what LoRA does not accept.
    """
    return LoRAConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_rank if args.lora_alpha is None else args.lora_alpha,
        target_modules=args.lora_target_modules or ALL_LINEAR,
    )


def flag_of(name: str) -> str:
    """The option that sets ``name``, an attribute of the command line."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def flags_of(name: str) -> tuple[str, str]:
    """The options that set ``name`` if it is a switch: on, and off."""
    return flag_of(name), f"--no-{flag_of(name).removeprefix('--')}"


def given_options(argv: Iterable[str]) -> frozenset[str]:
    """The options on a command line, which must not be abbreviated."""
    return frozenset(word.partition("=")[0] for word in argv if word.startswith("--"))


def name_of(args: argparse.Namespace, name: str) -> str:
    """``"--num-layers"``, or ``"num_layers of the preset tiny"`` if it is not on the command line.

    Args:
        args: The command line, with ``given``, its options.
        name: An attribute of it that describes the model.
    """
    if flag_of(name) in args.given:
        return flag_of(name)
    source = "checkpoint in --load" if args.use_checkpoint_args else f"preset {args.preset}"
    return f"{name} of the {source}"


def own_name_of(args: argparse.Namespace, name: str) -> str:
    """``"--seq-length"``, or ``"the default seq_length"``."""
    return flag_of(name) if flag_of(name) in args.given else f"the default {name}"
