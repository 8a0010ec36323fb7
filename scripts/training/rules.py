"""Rules of a command line: options that exclude or need each other, and sizes that must divide."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from megatron.core.extensions.transformer_engine import HAVE_TE

from absorbed_mla.options import CP_COMM_TYPES
from training.megatron_loop import ON_CPU
from training.options import flag_of, name_of, own_name_of
from training.refusals import only_absorbed

# Whether a command line breaks a rule, and what its user is told.
Rules = Iterator[tuple[bool, str]]

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
# Products in FP8 take tokens in groups of this size.
_FP8_TOKENS = 16


def refuse(rules: Rules) -> None:
    """Raise an error for the first rule that is broken.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    for wrong, message in rules:
        if wrong:
            raise ValueError(message)


def ranges(args: argparse.Namespace) -> Rules:
    """Numbers that are out of range whatever the other options are."""
    for names, least in ((_AT_LEAST_ONE, 1), (_NOT_NEGATIVE, 0)):
        for name in names:
            value = getattr(args, name)
            text = f"{flag_of(name)} must be at least {least}, got {value}"
            yield value is not None and value < least, text
    for name in _BELOW_ONE:
        value = getattr(args, name)
        yield not 0 <= value < 1, f"{flag_of(name)} must be in [0, 1), got {value}"


def _multiple(what: str, value: int, of: str, divisor: int, why: str = "") -> tuple[bool, str]:
    return value % divisor != 0, f"{what} must be divisible by {of}{why}, got {value}"


def parallelism(args: argparse.Namespace) -> Rules:
    """Tensor, pipeline and expert parallelism."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    of_tp, of_pp = f"--tensor-model-parallel-size {tp}", f"--pipeline-model-parallel-size {pp}"
    of_cp, of_ep = f"--context-parallel-size {cp}", f"--expert-model-parallel-size {ep}"
    layers, experts = name_of(args, "num_layers"), name_of(args, "num_experts")
    yield (
        args.world_size % (tp * pp * cp) != 0,
        f"{of_tp} x {of_pp} x {of_cp} = {tp * pp * cp} must divide the number of processes "
        f"(torchrun --nproc-per-node), got {args.world_size}",
    )
    for what, value in _split_by_tensor_parallelism(args):
        yield _multiple(what, value, of_tp, tp)
    if args.use_checkpoint_args:
        rows, name = args.model_vocab_size, name_of(args, "vocab_size")
        wrong, text = _multiple(f"{name}, which counts the padding,", rows, of_tp, tp)
        yield wrong, f"{text}. {how_to_pad(args.load, tp)}"
    else:
        rows = args.make_vocab_size_divisible_by
        yield _multiple("--make-vocab-size-divisible-by", rows, of_tp, tp)
    yield _multiple(layers, args.num_layers, of_pp, pp)
    text = "--sequence-parallel needs --tensor-model-parallel-size above 1, got 1"
    yield args.sequence_parallel and tp == 1, text
    yield (
        bool(args.num_experts) and tp > 1 and not args.sequence_parallel,
        f"{experts}, {args.num_experts}, with {of_tp} needs --sequence-parallel, without which "
        "Megatron does not train MoE layers under tensor parallelism (--num-experts 0: a dense "
        "model)",
    )
    wrong, text = _multiple(experts, args.num_experts or 0, of_ep, ep)
    yield ep > 1 and (wrong or not args.num_experts), text
    # Experts are split over data- and context-parallel ranks.
    ranks = args.world_size // (tp * pp)
    text = f"{of_ep} must divide the number of data-parallel ranks x {of_cp}, got {ranks}"
    yield ranks % ep != 0, text


def _split_by_tensor_parallelism(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Sizes that the tensor-parallel size must divide, with their names."""
    sizes = [(name_of(args, name), getattr(args, name) or 0) for name in split_sizes(args)]
    if args.sequence_parallel and args.context_parallel_size == 1:
        name = own_name_of(args, "seq_length")
        sizes.append((f"{name} with --sequence-parallel", args.seq_length))
    return sizes


def split_sizes(args: argparse.Namespace) -> list[str]:
    """Names of the sizes of a model that tensor-parallel ranks share, but its vocabulary."""
    of_experts = ["moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"]
    return ["num_attention_heads", "ffn_hidden_size", *(of_experts if args.num_experts else [])]


def context_parallelism(args: argparse.Namespace) -> Rules:
    """Context parallelism, and how its ranks exchange latents."""
    cp, tp = args.context_parallel_size, args.tensor_model_parallel_size
    types, standard = args.cp_comm_type, args.attention == "standard"
    yield (
        "auto" in types and standard,
        f"--cp-comm-type auto needs --attention absorbed, got {args.attention}; name "
        f"one of {', '.join(CP_COMM_TYPES)}",
    )
    accepted = CP_COMM_TYPES if standard else ("auto", *CP_COMM_TYPES)
    for name in types:
        yield (
            name not in accepted,
            f"--cp-comm-type must be one of {', '.join(accepted)}, got {name!r}: a2a and "
            "a2a+p2p split keys by heads, and all heads share one latent",
        )
    yield (
        len(types) not in (1, args.num_layers),
        "--cp-comm-type takes one type for all layers or one for each of "
        f"{name_of(args, 'num_layers')}, {args.num_layers}, got {len(types)}",
    )
    if cp == 1:
        return
    if args.packed:
        yield from _padded_packs(args)
    else:
        length, tokens = own_name_of(args, "seq_length"), args.seq_length
        divisor = f"2 x --context-parallel-size {cp} = {2 * cp}"
        why = " (each rank takes an early and a late chunk)"
        yield _multiple(length, tokens, divisor, 2 * cp, why)
        divisor = f"--context-parallel-size {cp} x --tensor-model-parallel-size {tp} = {cp * tp}"
        wrong, text = _multiple(f"{length} with --sequence-parallel", tokens, divisor, cp * tp)
        yield args.sequence_parallel and wrong, text
    yield (
        standard and args.transformer_impl == "local",
        f"--attention standard with --context-parallel-size {cp} needs --transformer-impl "
        "transformer_engine, got local: Megatron's local attention does not exchange keys between "
        "ranks",
    )


def _padded_packs(args: argparse.Namespace) -> Rules:
    """Layouts in which packs of different lengths meet Megatron's allgather dispatcher.

    Padding for context parallelism gives the packs of different groups different lengths.
    """
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    pp, allgather = args.pipeline_model_parallel_size, args.moe_token_dispatcher_type == "allgather"
    hit = bool(args.num_experts) and allgather
    why = (
        "its padding makes packs differ in length, which Megatron's allgather dispatcher does not "
        "support; use --moe-token-dispatcher-type alltoall"
    )
    yield (
        hit and pp > 1,
        f"--packed with --context-parallel-size {cp} and experts needs "
        f"--pipeline-model-parallel-size 1, got {pp}: {why}, or --num-experts 0",
    )
    yield (
        hit and cp % ep != 0,
        f"--packed with --context-parallel-size {cp} needs an --expert-model-parallel-size "
        f"that divides it, got {ep}: {why}",
    )


def how_to_pad(load: str | Path, ranks: int) -> str:
    """What to do about a checkpoint's vocabulary that tensor-parallel ranks do not divide."""
    return (
        f"Pad it: absorbed-mla-convert convert {shlex.quote(str(load))} FOLDER --to absorbed "
        f"--make-vocab-size-divisible-by {ranks}; then --load FOLDER"
    )


def is_padded(args: argparse.Namespace) -> bool:
    """Whether documents are padded, so that context parallelism can split them."""
    return args.packed and args.context_parallel_size > 1


def device(args: argparse.Namespace) -> Rules:
    """What needs a GPU."""
    for name, instead in (
        ("fp16", "use --bf16, or fp32 without either"),
        ("fp8", "leave it out"),
        ("moe_grouped_gemm", "leave it out to run experts one after the other"),
    ):
        text = f"{flag_of(name)} needs a GPU, and this machine has none; {instead}"
        yield ON_CPU and bool(getattr(args, name)), text
    text = "--transformer-impl transformer_engine needs a GPU, and this machine has none; use local"
    yield ON_CPU and args.transformer_impl == "transformer_engine" and not args.fp8, text
    yield ON_CPU and args.use_torch_fsdp2, "--use-torch-fsdp2 needs a GPU"


def batch(args: argparse.Namespace) -> Rules:
    """Sizes of sequences and batches."""
    length, longest = own_name_of(args, "seq_length"), args.max_position_embeddings
    yield (
        args.seq_length > longest,
        f"{length} {args.seq_length} must be at most {name_of(args, 'max_position_embeddings')}, "
        f"{longest}",
    )
    micro, ranks = args.micro_batch_size, args.data_parallel
    yield args.packed and micro != 1, f"--packed needs --micro-batch-size 1, got {micro}"
    divisor = f"{own_name_of(args, 'micro_batch_size')} {micro} x {ranks} data-parallel ranks"
    yield _multiple("--global-batch-size", args.global_batch_size, divisor, micro * ranks)


def precision(args: argparse.Namespace) -> Rules:
    """Precisions that exclude each other, and what FP8 needs."""
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
    divisor = _FP8_TOKENS * args.context_parallel_size
    divisor *= args.tensor_model_parallel_size if args.sequence_parallel else 1
    tokens = args.micro_batch_size * args.seq_length
    yield (
        tokens % divisor != 0,
        f"--fp8-format needs {divisor} to divide the tokens of a forward pass, "
        f"--micro-batch-size x {own_name_of(args, 'seq_length')}, got {tokens}",
    )


def training(args: argparse.Namespace) -> Rules:
    """The optimizer, recomputation, and what only absorbed MLA has."""
    decay, warmup = args.lr_decay_iters, args.lr_warmup_iters
    text = f"--lr-decay-iters must be above --lr-warmup-iters {warmup}, got {decay}"
    yield decay <= warmup, text
    text = "--lr-decay-style WSD needs --lr-wsd-decay-iters"
    yield args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None, text
    yield (
        args.use_distributed_optimizer and not HAVE_TE,
        "--use-distributed-optimizer needs TransformerEngine, without which Megatron does not "
        "resume such a run",
    )
    granularity = args.recompute_granularity
    method, layers = args.recompute_method, args.recompute_num_layers
    yield (
        granularity == "full" and not (method and layers),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers, "
        f"got {method} and {layers}",
    )
    yield (
        granularity != "full" and bool(method or layers),
        "--recompute-method and --recompute-num-layers need --recompute-granularity full, "
        f"got {granularity}",
    )
    yield (
        bool(args.recompute_modules) and granularity != "selective",
        f"--recompute-modules needs --recompute-granularity selective, got {granularity}",
    )
    threshold, alpha = args.qk_clip_threshold, args.qk_clip_alpha
    yield not threshold > 0, f"--qk-clip-threshold must be above 0, got {threshold}"
    yield not 0 <= alpha <= 1, f"--qk-clip-alpha must be from 0 to 1, got {alpha}"
    sparse = args.experimental_attention_variant is not None
    yield sparse and args.attention != "absorbed", only_absorbed(args.attention)
    context = args.original_max_position_embeddings
    scaled = args.llama_4_scaling_beta is not None and args.seq_length > context
    yield (
        scaled and args.attention != "absorbed",
        "--attention must be absorbed for a model with llama_4_scaling_beta and --seq-length above "
        f"{context}, got {args.attention}: Megatron's MLASelfAttention does not scale queries",
    )
