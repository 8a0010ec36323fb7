"""Check the command line before any work."""

from __future__ import annotations

import argparse
import importlib.util

from console.outputs import require_writable
from training import fp8, sparse_options
from training.options_named import flag_of, name_of, value_of
from training.parallelism import check_parallelism

_AT_LEAST_ONE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "eval_interval",
    "log_interval",
    "save_interval",
    "exit_interval",
    "lr_decay_iters",
    "make_vocab_size_divisible_by",
    "recompute_num_layers",
)
_NOT_NEGATIVE = (
    "train_iters",
    "eval_iters",
    "lr_warmup_iters",
    "lr",
    "min_lr",
    "weight_decay",
    "clip_grad",
    "seed",
)
# Options that need a GPU: name, value that needs it, what to do without a GPU.
_GPU_ONLY = (
    ("fp16", True, "use --bf16, or fp32 without either"),
    ("fp8_format", "e4m3", "leave it out"),
    ("fp8_format", "hybrid", "leave it out"),
    ("moe_grouped_gemm", True, "leave it out to run experts one after the other"),
    ("transformer_impl", "transformer_engine", "use local"),
)


def validate_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Refuse options that cannot work, and fill in defaults that depend on other options.

    Args:
        args: Parsed command line; ``model`` is the resolved :class:`ModelPreset`.
        world_size: Number of processes.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    _check_ranges(args)
    check_parallelism(args, world_size)
    _check_batch(args, world_size)
    fp8.check(args)
    check_device(args)
    _check_recompute(args)
    _check_qk_clip(args)
    sparse_options.check(args)
    args.split_percent = parse_split(args.split)
    _check_files(args)
    args.min_lr = args.lr / 10 if args.min_lr is None else args.min_lr
    args.lr_decay_iters = args.lr_decay_iters or max(1, args.train_iters)


def parse_split(text: str) -> float:
    """Percentage of the tokens for training in a text such as ``"95,5"``.

    Raises:
        ValueError: If ``text`` is not two numbers whose sum is 100.
    """
    try:
        train, valid = (float(x) for x in text.split(","))
    except ValueError:
        train = valid = -1.0
    if not (train > 0 and valid >= 0 and abs(train + valid - 100) < 1e-6):
        raise ValueError(
            f"--split must be two percentages whose sum is 100, such as 95,5; got {text!r}"
        )
    return train


def _check_ranges(args: argparse.Namespace) -> None:
    for names, least in ((_AT_LEAST_ONE, 1), (_NOT_NEGATIVE, 0)):
        for name in names:
            value = getattr(args, name)
            if value is not None and value < least:
                raise ValueError(f"{flag_of(name)} must be at least {least}, got {value}")
    for name in ("attention_dropout", "hidden_dropout", "adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"{flag_of(name)} must be in [0, 1), got {getattr(args, name)}")
    if args.seq_length > args.model.max_position_embeddings:
        raise ValueError(
            f"{value_of(args, '--seq-length')} must be at most "
            f"{name_of(args, '--max-position-embeddings')}, {args.model.max_position_embeddings}"
        )


def _check_batch(args: argparse.Namespace, world_size: int) -> None:
    if args.micro_batch_size is None:
        args.micro_batch_size = 1 if args.packed else 8
    if args.packed and args.micro_batch_size != 1:
        raise ValueError(f"--packed needs --micro-batch-size 1, got {args.micro_batch_size}")
    dp = world_size // (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    step = args.micro_batch_size * dp
    if args.global_batch_size is None:
        args.global_batch_size = step * args.pipeline_model_parallel_size
    if args.global_batch_size % step:
        raise ValueError(
            f"--global-batch-size must be divisible by {value_of(args, '--micro-batch-size')} x "
            f"{dp} data-parallel ranks, got {args.global_batch_size}"
        )


def check_device(args: argparse.Namespace) -> None:
    """Check that there is a GPU if an option needs one.

    Raises:
        ValueError: Naming the option, and what works without a GPU.
    """
    asked_for = [row for row in _GPU_ONLY if getattr(args, row[0]) == row[1]]
    if not asked_for:
        return
    # Imported late, because it takes seconds.
    import torch

    if not torch.cuda.is_available():
        name, value, instead = asked_for[0]
        option = flag_of(name) if value is True else f"{flag_of(name)} {value}"
        raise ValueError(f"{option} needs a GPU, and this machine has none; {instead}")


def _check_recompute(args: argparse.Namespace) -> None:
    full = args.recompute_granularity == "full"
    if full and not (args.recompute_method and args.recompute_num_layers):
        raise ValueError(
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers, "
            f"got {args.recompute_method} and {args.recompute_num_layers}"
        )
    if not full and (args.recompute_method or args.recompute_num_layers):
        raise ValueError(
            "--recompute-method and --recompute-num-layers need --recompute-granularity full, "
            f"got {args.recompute_granularity}"
        )
    if args.recompute_modules and args.recompute_granularity != "selective":
        raise ValueError(
            "--recompute-modules needs --recompute-granularity selective, "
            f"got {args.recompute_granularity}"
        )


def _check_qk_clip(args: argparse.Namespace) -> None:
    asked_for = [name for name in ("qk_clip", "log_max_attention_logit") if getattr(args, name)]
    if asked_for and args.attention != "absorbed":
        raise ValueError(
            f"{flag_of(asked_for[0])} needs --attention absorbed, which records its largest "
            f"scores; got {args.attention}"
        )
    if not args.qk_clip_threshold > 0:
        raise ValueError(f"--qk-clip-threshold must be above 0, got {args.qk_clip_threshold}")
    if not 0 <= args.qk_clip_alpha <= 1:
        raise ValueError(f"--qk-clip-alpha must be from 0 to 1, got {args.qk_clip_alpha}")


def _check_files(args: argparse.Namespace) -> None:
    if args.save_interval and not args.save:
        raise ValueError("--save-interval needs --save, the folder to save to")
    if args.finetune and not args.load:
        raise ValueError("--finetune needs --load, the checkpoint to take the weights from")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    files = {"--metrics": args.metrics, "--plot": args.plot}
    require_writable(folders={"--save": args.save}, files=files)
