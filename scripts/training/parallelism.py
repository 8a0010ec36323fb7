"""Rules of parallel sizes: what must divide the model, the sequences and the processes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from absorbed_mla.options import CP_COMM_TYPES
from training.options import name_of, own_name_of

# Whether a command line breaks a rule, and what its user is told.
Rules = Iterator[tuple[bool, str]]


def parallelism(args: argparse.Namespace) -> Rules:
    """Tensor, pipeline and expert parallelism."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    experts = args.num_experts
    yield (
        args.world_size % (tp * pp * cp) != 0,
        f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x "
        f"--context-parallel-size {cp} = {tp * pp * cp} must divide the number of processes "
        f"(torchrun --nproc-per-node), got {args.world_size}",
    )
    for what, value in _split_by_tensor_parallelism(args):
        text = f"{what} must be divisible by --tensor-model-parallel-size {tp}, got {value}"
        yield value % tp != 0, text
    yield _vocabulary(args)
    yield (
        args.num_layers % pp != 0,
        f"{name_of(args, 'num_layers')} must be divisible by --pipeline-model-parallel-size {pp}, "
        f"got {args.num_layers}",
    )
    text = "--sequence-parallel needs --tensor-model-parallel-size above 1, got 1"
    yield args.sequence_parallel and tp == 1, text
    yield (
        bool(experts) and tp > 1 and not args.sequence_parallel,
        f"{name_of(args, 'num_experts')}, {experts}, with --tensor-model-parallel-size {tp} needs "
        "--sequence-parallel, without which Megatron does not train MoE layers under tensor "
        "parallelism (--num-experts 0: a dense model)",
    )
    yield (
        ep > 1 and (not experts or experts % ep != 0),
        f"{name_of(args, 'num_experts')} must be divisible by --expert-model-parallel-size {ep}, "
        f"got {experts or 0}",
    )
    # Experts are split over data- and context-parallel ranks.
    ranks = args.world_size // (tp * pp)
    yield (
        ranks % ep != 0,
        f"--expert-model-parallel-size {ep} must divide the number of data-parallel ranks x "
        f"--context-parallel-size {cp}, got {ranks}",
    )


def _split_by_tensor_parallelism(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Sizes that the tensor-parallel size must divide, with their names."""
    names = ["num_attention_heads", "ffn_hidden_size"]
    if args.num_experts:
        names += ["moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"]
    sizes = [(name_of(args, name), getattr(args, name) or 0) for name in names]
    if args.sequence_parallel and args.context_parallel_size == 1:
        name = own_name_of(args, "seq_length")
        sizes.append((f"{name} with --sequence-parallel", args.seq_length))
    return sizes


def _vocabulary(args: argparse.Namespace) -> tuple[bool, str]:
    """Whether tensor-parallel ranks can share the rows of the embedding."""
    tp, rows = args.tensor_model_parallel_size, args.make_vocab_size_divisible_by
    what, remedy = "--make-vocab-size-divisible-by", ""
    if args.use_checkpoint_args:
        rows = args.model_vocab_size
        what = f"{name_of(args, 'vocab_size')}, which counts the padding,"
        remedy = f". {how_to_pad(args.load, tp)}"
    text = f"{what} must be divisible by --tensor-model-parallel-size {tp}, got {rows}{remedy}"
    return rows % tp != 0, text


def context_parallelism(args: argparse.Namespace) -> Rules:
    """Context parallelism, and how its ranks exchange latents."""
    cp, tp = args.context_parallel_size, args.tensor_model_parallel_size
    types, layers = args.cp_comm_type, args.num_layers
    yield (
        "auto" in types and args.attention == "standard",
        f"--cp-comm-type auto needs --attention absorbed, got {args.attention}; name "
        f"one of {', '.join(CP_COMM_TYPES)}",
    )
    accepted = CP_COMM_TYPES if args.attention == "standard" else ("auto", *CP_COMM_TYPES)
    for name in types:
        yield (
            name not in accepted,
            f"--cp-comm-type must be one of {', '.join(accepted)}, got {name!r}: a2a and "
            "a2a+p2p split keys by heads, and all heads share one latent",
        )
    yield (
        len(types) not in (1, layers),
        "--cp-comm-type takes one type for all layers or one for each of "
        f"{name_of(args, 'num_layers')}, {layers}, got {len(types)}",
    )
    if cp == 1:
        return
    length = own_name_of(args, "seq_length")
    yield (
        not args.packed and args.seq_length % (2 * cp) != 0,
        f"{length} must be divisible by 2 x --context-parallel-size {cp} = {2 * cp} "
        f"(each rank takes an early and a late chunk), got {args.seq_length}",
    )
    yield (
        not args.packed and args.sequence_parallel and args.seq_length % (cp * tp) != 0,
        f"{length} with --sequence-parallel must be divisible by --context-parallel-size "
        f"{cp} x --tensor-model-parallel-size {tp} = {cp * tp}, got {args.seq_length}",
    )
    yield from _padded_packs(args)
    yield (
        args.attention == "standard" and args.transformer_impl == "local",
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
    hit = args.packed and bool(args.num_experts) and allgather
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


def lengths_vary(args: argparse.Namespace) -> bool:
    """Padded packs differ in length, so pipeline stages must send each other the lengths."""
    return is_padded(args) and args.pipeline_model_parallel_size > 1
