"""The command line. Names are Megatron's where Megatron has the option."""

from __future__ import annotations

import argparse

from absorbed_mla.context_parallel import CP_COMM_TYPES
from absorbed_mla.options import DOWN_PROJECTIONS, FORMS
from training.presets import PRESETS
from training.schedule import DECAY_STYLES

_SIZES = (
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "kv-lora-rank",
    "qk-head-dim",
    "qk-pos-emb-head-dim",
    "v-head-dim",
    "max-position-embeddings",
    "vocab-size",
)
_MODEL_DEFAULTS = {"preset": "tiny", "scale_down": 1, "make_vocab_size_divisible_by": 64}
# What --use-checkpoint-args says instead. The length may be extended, and the balancing of experts
# is no part of the model.
_OF_THE_CHECKPOINT = (
    *_MODEL_DEFAULTS,
    *(name.replace("-", "_") for name in _SIZES if name != "max-position-embeddings"),
    "q_lora_rank",
    "norm_epsilon",
    "rope_type",
    "rotary_base",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse ``argv``; nothing is checked beyond types, choices and what excludes each other.

    Raises:
        ValueError: If an option is unknown, has no such value, or excludes another.
    """
    parser = _Parser(
        prog="train.py",
        description="Train a GPT with (absorbed) multi-head latent attention, by torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
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


class _Parser(argparse.ArgumentParser):
    """Reports like every other user error: one line, from one rank."""

    def error(self, message: str) -> None:
        raise ValueError(f"{message} (--help lists all options)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model", "Sizes left out come from the preset.")
    group.add_argument(
        "--use-checkpoint-args",
        action="store_true",
        help="take the model from the checkpoint in --load, and not from the options below",
    )
    group.add_argument("--preset", help=f"one of {', '.join(PRESETS)}; if left out: tiny")
    group.add_argument(
        "--scale-down", type=int, metavar="N", help="divide the preset's sizes by N; if left out: 1"
    )
    for name in _SIZES:
        group.add_argument(f"--{name}", type=int)
    group.add_argument("--q-lora-rank", type=int, help="0 projects the query without compression")
    group.add_argument("--norm-epsilon", type=float)
    group.add_argument("--rope-type", choices=("rope", "yarn"))
    group.add_argument("--rotary-base", type=float)
    group.add_argument("--rotary-scaling-factor", type=float)
    group.add_argument("--mscale", type=float)
    group.add_argument("--mscale-all-dim", type=float)
    group.add_argument(
        "--make-vocab-size-divisible-by", type=int, help="vocabulary padding; if left out: 64"
    )
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument("--attention-dropout", type=float, default=0.0)
    group.add_argument("--hidden-dropout", type=float, default=0.0)


def _add_attention(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("attention")
    group.add_argument(
        "--attention",
        choices=("absorbed", "standard"),
        default="absorbed",
        help="standard is Megatron's own MLASelfAttention, to compare with",
    )
    group.add_argument("--form", choices=FORMS, default="auto", help="how absorbed MLA is executed")
    group.add_argument("--down-projection", choices=DOWN_PROJECTIONS, default="duplicated")
    group.add_argument(
        "--latent-norm-epsilon",
        type=float,
        help="epsilon of the attention's own norms, if not the preset's",
    )
    group.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        help="if left out: transformer_engine where it is installed and a GPU is there, else local",
    )


def _add_moe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mixture of experts")
    group.add_argument("--num-experts", type=int, help="0 for a dense model")
    group.add_argument("--moe-layer-freq", help="every N-th layer, or a list like ([0]*1+[1]*2)")
    group.add_argument("--moe-ffn-hidden-size", type=int)
    group.add_argument("--moe-shared-expert-intermediate-size", type=int, help="0 for none")
    group.add_argument("--moe-router-topk", type=int)
    group.add_argument("--moe-aux-loss-coeff", type=float)
    group.add_argument(
        "--moe-token-dispatcher-type",
        choices=("allgather", "alltoall"),
        help="default: alltoall on a GPU; only allgather works without",
    )
    group.add_argument("--moe-grouped-gemm", action="store_true", help="GPU only")


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism and recomputation")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--expert-model-parallel-size", type=int, default=1)
    group.add_argument(
        "--context-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks that each sequence is cut over, in an early and a late chunk for each",
    )
    group.add_argument(
        "--cp-comm-type",
        nargs="+",
        default=["all_gather"],
        metavar="TYPE",
        help=f"how they exchange latents: {' or '.join(CP_COMM_TYPES)}, one for all layers or one "
        "for each layer",
    )
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--overlap-grad-reduce", action="store_true")
    group.add_argument("--recompute-granularity", choices=("selective", "full"))
    group.add_argument(
        "--recompute-modules",
        nargs="+",
        help="for selective: core_attn, mla_up_proj, mlp, moe, ...",
    )
    group.add_argument("--recompute-method", choices=("uniform", "block"), help="for full")
    group.add_argument("--recompute-num-layers", type=int, help="for full")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--seq-length", type=int, default=128)
    group.add_argument("--micro-batch-size", type=int, default=None, help="default: 8, packed: 1")
    group.add_argument(
        "--global-batch-size", type=int, help="default: one micro-batch per data-parallel rank"
    )
    group.add_argument("--train-iters", type=int, default=200)
    group.add_argument("--exit-interval", type=int, help="save and stop at a multiple of this")
    group.add_argument("--lr", type=float, default=2e-3)
    group.add_argument("--min-lr", type=float, default=None, help="default: a tenth of --lr")
    group.add_argument("--lr-warmup-iters", type=int, default=10)
    group.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    group.add_argument("--lr-decay-style", choices=DECAY_STYLES, default="cosine")
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.95)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument(
        "--clip-grad", type=float, default=1.0, help="0 to leave gradients as they are"
    )
    group.add_argument("--seed", type=int, default=1234)
    precision = group.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true")
    precision.add_argument("--fp16", action="store_true", help="GPU only")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        metavar="PATH",
        help="text file or folder; default: the standard library's sources",
    )
    group.add_argument(
        "--tokenizer", metavar="FOLDER", help="Hugging Face tokenizer; default: every byte a token"
    )
    group.add_argument("--split", default="95,5", help="percent for training, for validation")
    group.add_argument(
        "--packed", action="store_true", help="every document its own sequence (thd), batch of 1"
    )


def _add_io(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints, validation and reports")
    group.add_argument(
        "--load", metavar="FOLDER", help="checkpoint to resume, or weights to start from"
    )
    group.add_argument(
        "--finetune", action="store_true", help="take only the weights of --load and start at 0"
    )
    group.add_argument("--save", metavar="FOLDER")
    group.add_argument("--save-interval", type=int, help="default: at the end only")
    group.add_argument("--eval-interval", type=int, default=100)
    group.add_argument("--eval-iters", type=int, default=4, help="0 for no validation")
    group.add_argument("--log-interval", type=int, default=10)
    group.add_argument("--metrics", metavar="FILE", help="JSON lines, one per iteration")
    group.add_argument("--plot", metavar="FILE", help="PNG of the losses")
    group.add_argument(
        "--compare-metrics",
        metavar="FILE",
        help="another run's --metrics, shown beside this run's at the end and in the plot",
    )
    group.add_argument("--no-progress", action="store_true", help="no progress bar")
