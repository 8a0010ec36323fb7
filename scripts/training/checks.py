"""Check a command line before any work; what Megatron says clearly itself is left to it."""

from __future__ import annotations

import argparse
import importlib.util
import os

from megatron.core.extensions.transformer_engine import HAVE_TE

from console.outputs import require_writable
from training.megatron_loop import ON_CPU, validate_args
from training.options import flag_of, name_of, own_name_of
from training.parallelism import Rules, context_parallelism, is_padded, lengths_vary, parallelism

_AT_LEAST_ONE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("context_parallel_size", "seq_length", "micro_batch_size", "global_batch_size"),
    *("eval_interval", "log_interval", "save_interval", "exit_interval", "lr_decay_iters"),
    *("make_vocab_size_divisible_by", "recompute_num_layers", "seed"),
)
_NOT_NEGATIVE = (
    *("train_iters", "eval_iters", "lr_warmup_iters", "lr", "min_lr", "weight_decay"),
    "clip_grad",
)
_BELOW_ONE = ("attention_dropout", "hidden_dropout", "adam_beta1", "adam_beta2")
# Options that need a GPU: name, what to do without a GPU.
_GPU_ONLY = (
    ("fp16", "use --bf16, or fp32 without either"),
    ("fp8", "leave it out"),
    ("moe_grouped_gemm", "leave it out to run experts one after the other"),
)
_DATA = "the data is that of --data, the standard library's code without it"
_TOKENIZER = "--tokenizer names a folder; without it every byte is a token"
# Megatron's arguments that would have no effect, or fail: why.
_NOT_TAKEN = {
    **dict.fromkeys(("--data-path", "--data-args-path", "--mock-data"), _DATA),
    **dict.fromkeys(("--train-data-path", "--valid-data-path", "--test-data-path"), _DATA),
    "--per-split-data-args-path": _DATA,
    **dict.fromkeys(("--tokenizer-type", "--tokenizer-model", "--vocab-file"), _TOKENIZER),
    "--merge-file": _TOKENIZER,
    "--dataloader-type": "windows of --data follow each other",
    "--full-validation": "--eval-iters says how much is evaluated",
    "--spec": "--attention chooses the layers",
    "--ckpt-format": "checkpoints are torch_dist, which every script loads",
    "--no-save-optim": "such a run could not be resumed; --finetune takes the weights alone",
    "--async-save": "a checkpoint is complete when the next step begins",
    "--save-retain-interval": "a checkpoint is complete when the next step begins",
}
# Products in FP8 take tokens in groups of this size.
_FP8_TOKENS = 16


def validate_arguments(args: argparse.Namespace) -> None:
    """Refuse options that cannot work, and fill in defaults that depend on other options.

    Args:
        args: Of :func:`~training.arguments.parse_arguments`; afterwards as Megatron's
            ``validate_args`` leaves it.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    _check_ranges(args)
    complete(args)
    for rules in (
        parallelism,
        _batch,
        _precision,
        _device,
        context_parallelism,
        _training,
        _files,
    ):
        _refuse(rules(args))
    args.split_percent = parse_split(args.split)
    files = {"--metrics": args.metrics, "--plot": args.plot}
    require_writable(folders={"--save": args.save}, files=files)
    validate_by_megatron(args)


def check_device(args: argparse.Namespace) -> None:
    """Check that there is a GPU if an option needs one.

    Raises:
        ValueError: Naming the option, and what works without a GPU.
    """
    _refuse(_device(args))


def _refuse(rules: Rules) -> None:
    for wrong, message in rules:
        if wrong:
            raise ValueError(message)


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
    for name in _BELOW_ONE:
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"{flag_of(name)} must be in [0, 1), got {getattr(args, name)}")


def complete(args: argparse.Namespace) -> None:
    """Defaults that depend on other options, and on the machine."""
    given = args.given
    shared = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.data_parallel = args.world_size // (shared * args.context_parallel_size)
    if args.micro_batch_size is None:
        args.micro_batch_size = 1 if args.packed else 8
    if args.global_batch_size is None:
        step = args.micro_batch_size * args.data_parallel
        args.global_batch_size = step * args.pipeline_model_parallel_size
    if "--min-lr" not in given:
        args.min_lr = args.lr / 10
    if args.lr_decay_iters is None:
        # Megatron refuses a decay that ends within the warm-up.
        args.lr_decay_iters = max(args.train_iters, args.lr_warmup_iters + 1)
    if args.save and args.save_interval is None:
        args.save_interval = max(1, args.train_iters)
    if "--transformer-impl" not in given:
        te = HAVE_TE and not ON_CPU
        args.transformer_impl = "transformer_engine" if te else "local"
    if "--moe-token-dispatcher-type" not in given:
        # While generating, ranks that share experts have different numbers of tokens. And Megatron
        # refuses the other one with packs of different lengths, even without experts.
        alltoall = not ON_CPU or args.expert_model_parallel_size > 1
        alltoall |= not args.num_experts and lengths_vary(args)
        args.moe_token_dispatcher_type = "alltoall" if alltoall else "allgather"
    args.variable_seq_lengths = lengths_vary(args)
    if args.experimental_attention_variant is not None:
        # What "auto" takes with sparse attention. Megatron's config accepts no other name.
        args.cp_comm_type = ["all_gather" if x == "auto" else x for x in args.cp_comm_type]
    args.use_cpu_initialization = args.use_cpu_initialization or ON_CPU
    if ON_CPU:
        args.distributed_backend = "gloo"


def _device(args: argparse.Namespace) -> Rules:
    for name, instead in _GPU_ONLY:
        text = f"{flag_of(name)} needs a GPU, and this machine has none; {instead}"
        yield ON_CPU and bool(getattr(args, name)), text
    text = "--transformer-impl transformer_engine needs a GPU, and this machine has none; use local"
    yield ON_CPU and args.transformer_impl == "transformer_engine" and not args.fp8, text
    yield ON_CPU and args.use_torch_fsdp2, "--use-torch-fsdp2 needs a GPU"


def _batch(args: argparse.Namespace) -> Rules:
    length, micro = own_name_of(args, "seq_length"), own_name_of(args, "micro_batch_size")
    yield (
        args.seq_length > args.max_position_embeddings,
        f"{length} {args.seq_length} must be at most {name_of(args, 'max_position_embeddings')}, "
        f"{args.max_position_embeddings}",
    )
    text = f"--packed needs --micro-batch-size 1, got {args.micro_batch_size}"
    yield args.packed and args.micro_batch_size != 1, text
    yield (
        args.global_batch_size % (args.micro_batch_size * args.data_parallel) != 0,
        f"--global-batch-size must be divisible by {micro} {args.micro_batch_size} x "
        f"{args.data_parallel} data-parallel ranks, got {args.global_batch_size}",
    )


def _precision(args: argparse.Namespace) -> Rules:
    yield args.bf16 and args.fp16, "argument --fp16: not allowed with argument --bf16"
    recipe, ends, given = "--fp8-recipe", "--first-last-layers-bf16", args.given
    for flag in (recipe, ends):
        yield flag in given and not args.fp8, f"{flag} needs --fp8-format"
    for flag in ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"):
        yield flag in given and ends not in given, f"{flag} needs {ends}"
    if not args.fp8:
        return
    yield not args.bf16, "--fp8-format needs --bf16, the precision of everything else"
    yield (
        args.transformer_impl == "local" and not (ON_CPU and "--transformer-impl" not in given),
        "--fp8-format needs --transformer-impl transformer_engine, got local, whose layers "
        "have no FP8",
    )
    yield (
        args.first_last_layers_bf16 and args.fp8_recipe == "delayed",
        f"{ends} does not go with {recipe} delayed; use tensorwise or blockwise",
    )
    ranks = args.context_parallel_size
    ranks *= args.tensor_model_parallel_size if args.sequence_parallel else 1
    tokens = args.micro_batch_size * args.seq_length
    yield (
        tokens % (ranks * _FP8_TOKENS) != 0,
        f"--fp8-format needs {_FP8_TOKENS * ranks} to divide the tokens of a forward pass, "
        f"--micro-batch-size x {own_name_of(args, 'seq_length')}, got {tokens}",
    )


def _training(args: argparse.Namespace) -> Rules:
    decay, warmup = args.lr_decay_iters, args.lr_warmup_iters
    text = f"--lr-decay-iters must be above --lr-warmup-iters {warmup}, got {decay}"
    yield decay <= warmup, text
    yield (
        args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None,
        "--lr-decay-style WSD needs --lr-wsd-decay-iters",
    )
    yield (
        args.use_distributed_optimizer and not HAVE_TE,
        "--use-distributed-optimizer needs TransformerEngine, without which Megatron does not "
        "resume such a run",
    )
    full, granularity = args.recompute_granularity == "full", args.recompute_granularity
    method, layers = args.recompute_method, args.recompute_num_layers
    yield (
        full and not (method and layers),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers, "
        f"got {method} and {layers}",
    )
    yield (
        not full and bool(method or layers),
        "--recompute-method and --recompute-num-layers need --recompute-granularity full, "
        f"got {granularity}",
    )
    yield (
        bool(args.recompute_modules) and granularity != "selective",
        f"--recompute-modules needs --recompute-granularity selective, got {granularity}",
    )
    for name in ("qk_clip", "log_max_attention_logit"):
        yield (
            getattr(args, name) and args.attention != "absorbed",
            f"{flag_of(name)} needs --attention absorbed, which records its largest scores; got "
            f"{args.attention}",
        )
    threshold, alpha = args.qk_clip_threshold, args.qk_clip_alpha
    yield not threshold > 0, f"--qk-clip-threshold must be above 0, got {threshold}"
    yield not 0 <= alpha <= 1, f"--qk-clip-alpha must be from 0 to 1, got {alpha}"
    yield (
        args.experimental_attention_variant is not None and args.attention != "absorbed",
        "--attention must be absorbed for a model with sparse attention, got "
        f"{args.attention}: Megatron's MLASelfAttention is dense",
    )


def _files(args: argparse.Namespace) -> Rules:
    needs = "the checkpoint to take the weights from"
    yield bool(args.save_interval) and not args.save, "--save-interval needs --save, the folder"
    yield args.finetune and not args.load, f"--finetune needs --load, {needs}"
    yield (
        args.new_indexer and not args.load,
        "--new-indexer needs --load, the dense checkpoint to start from",
    )
    for flag, why in _NOT_TAKEN.items():
        yield flag in args.given, f"{flag} is not taken: {why}"
    no_plot = bool(args.plot) and importlib.util.find_spec("matplotlib") is None
    yield no_plot, "--plot needs matplotlib: pip install matplotlib"


def validate_by_megatron(args: argparse.Namespace) -> None:
    """Megatron's own checks and derived arguments, without its prints."""
    if args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Our layers do without TransformerEngine's scores, and packs are padded to a length that
    # context-parallel ranks can cut.
    ours = {name: getattr(args, name) for name in ("qk_clip", "log_max_attention_logit")}
    ours |= {"seq_length": args.seq_length, "variable_seq_lengths": args.variable_seq_lengths}
    args.qk_clip = args.log_max_attention_logit = False
    if is_padded(args):
        args.seq_length += -args.seq_length % (2 * args.context_parallel_size)
        args.max_position_embeddings = max(args.max_position_embeddings, args.seq_length)
    validate_args(args)
    vars(args).update(ours)
    args._is_global_batch_size_explicitly_specified = True
