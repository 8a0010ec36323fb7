"""Check the parallel sizes against the model and the number of processes."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from absorbed_mla.options import CP_COMM_TYPES
from training.model_options import token_dispatcher, transformer_impl
from training.options_named import name_of, own_name_of


def check_parallelism(args: argparse.Namespace, world_size: int) -> None:
    """Refuse parallel sizes that do not divide the model, the sequences or the processes.

    Args:
        args: The command line; ``model`` is the resolved :class:`ModelPreset`.
        world_size: Number of processes.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, model = args.context_parallel_size, args.model
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x "
            f"--context-parallel-size {cp} = {tp * pp * cp} must divide the number of processes "
            f"(torchrun --nproc-per-node), got {world_size}"
        )
    for what, value in _split_by_tensor_parallelism(args):
        if value % tp:
            raise ValueError(
                f"{what} must be divisible by --tensor-model-parallel-size {tp}, got {value}"
            )
    _check_vocabulary(args)
    if model.num_layers % pp:
        raise ValueError(
            f"{name_of(args, '--num-layers')} must be divisible by "
            f"--pipeline-model-parallel-size {pp}, got {model.num_layers}"
        )
    if args.sequence_parallel and tp == 1:
        raise ValueError("--sequence-parallel needs --tensor-model-parallel-size above 1, got 1")
    if model.num_moe_experts and tp > 1 and not args.sequence_parallel:
        raise ValueError(
            f"{name_of(args, '--num-experts')}, {model.num_moe_experts}, with "
            f"--tensor-model-parallel-size {tp} needs --sequence-parallel, without which Megatron "
            "does not train MoE layers under tensor parallelism (--num-experts 0: a dense model)"
        )
    _check_context_parallelism(args)
    _check_expert_parallelism(args, world_size)


def _split_by_tensor_parallelism(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Sizes that the tensor-parallel size must divide, with their names."""
    model = args.model
    sizes = [
        (name_of(args, "--num-attention-heads"), model.num_attention_heads),
        (name_of(args, "--ffn-hidden-size"), model.ffn_hidden_size),
    ]
    if args.sequence_parallel and args.context_parallel_size == 1:
        name = own_name_of(args, "--seq-length")
        sizes.append((f"{name} with --sequence-parallel", args.seq_length))
    if model.num_moe_experts:
        shared = model.moe_shared_expert_intermediate_size or 0
        sizes.append((name_of(args, "--moe-ffn-hidden-size"), model.moe_ffn_hidden_size))
        sizes.append((name_of(args, "--moe-shared-expert-intermediate-size"), shared))
    return sizes


def how_to_pad(load: Path, ranks: int) -> str:
    """What to do about a checkpoint's vocabulary that tensor-parallel ranks do not divide."""
    return (
        f"Pad it: absorbed-mla-convert convert {shlex.quote(str(load))} FOLDER --to absorbed "
        f"--make-vocab-size-divisible-by {ranks}; then --load FOLDER"
    )


def _check_vocabulary(args: argparse.Namespace) -> None:
    """Whether tensor-parallel ranks can share the rows of the embedding."""
    tp, rows = args.tensor_model_parallel_size, args.make_vocab_size_divisible_by
    if rows % tp == 0:
        return
    what, remedy = "--make-vocab-size-divisible-by", ""
    if args.use_checkpoint_args:
        what = f"{name_of(args, '--vocab-size')}, which counts the padding,"
        remedy = f". {how_to_pad(args.load, tp)}"
    raise ValueError(
        f"{what} must be divisible by --tensor-model-parallel-size {tp}, got {rows}{remedy}"
    )


def _check_expert_parallelism(args: argparse.Namespace, world_size: int) -> None:
    ep = args.expert_model_parallel_size
    if ep == 1:
        return
    experts = args.model.num_moe_experts
    if not experts or experts % ep:
        raise ValueError(
            f"{name_of(args, '--num-experts')} must be divisible by "
            f"--expert-model-parallel-size {ep}, got {experts or 0}"
        )
    # Experts are split over data- and context-parallel ranks.
    ranks = world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    if ranks % ep:
        raise ValueError(
            f"--expert-model-parallel-size {ep} must divide the number of data-parallel ranks x "
            f"--context-parallel-size {args.context_parallel_size}, got {ranks}"
        )


def _check_context_parallelism(args: argparse.Namespace) -> None:
    _check_comm_types(args)
    if args.context_parallel_size == 1:
        return
    # Imported late, because it takes seconds.
    import torch

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if args.packed:
        _check_packed(args, token_dispatcher(args, device_type))
    else:
        _check_seq_length(args)
    if args.attention == "standard" and transformer_impl(args, device_type) == "local":
        raise ValueError(
            "--attention standard with --context-parallel-size "
            f"{args.context_parallel_size} needs --transformer-impl transformer_engine, got local: "
            "Megatron's local attention does not exchange keys between ranks"
        )


def _check_comm_types(args: argparse.Namespace) -> None:
    types, layers = args.cp_comm_type, args.model.num_layers
    accepted = CP_COMM_TYPES if args.attention == "standard" else ("auto", *CP_COMM_TYPES)
    for name in types:
        if name == "auto" and name not in accepted:
            raise ValueError(
                f"--cp-comm-type auto needs --attention absorbed, got {args.attention}; name "
                f"one of {', '.join(accepted)}"
            )
        if name not in accepted:
            raise ValueError(
                f"--cp-comm-type must be one of {', '.join(accepted)}, got {name!r}: a2a and "
                "a2a+p2p split keys by heads, and all heads share one latent"
            )
    if len(types) not in (1, layers):
        raise ValueError(
            "--cp-comm-type takes one type for all layers or one for each of "
            f"{name_of(args, '--num-layers')}, {layers}, got {len(types)}"
        )


def _check_seq_length(args: argparse.Namespace) -> None:
    cp, tp = args.context_parallel_size, args.tensor_model_parallel_size
    length = own_name_of(args, "--seq-length")
    if args.seq_length % (2 * cp):
        raise ValueError(
            f"{length} must be divisible by 2 x --context-parallel-size {cp} = {2 * cp} "
            f"(each rank takes an early and a late chunk), got {args.seq_length}"
        )
    if args.sequence_parallel and args.seq_length % (cp * tp):
        raise ValueError(
            f"{length} with --sequence-parallel must be divisible by --context-parallel-size "
            f"{cp} x --tensor-model-parallel-size {tp} = {cp * tp}, got {args.seq_length}"
        )


def _check_packed(args: argparse.Namespace, dispatcher: str) -> None:
    """Refuse layouts in which packs of different lengths meet Megatron's allgather dispatcher.

    Padding for context parallelism gives the packs of different groups different lengths.
    """
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    if not args.model.num_moe_experts or dispatcher != "allgather":
        return
    why = (
        "its padding makes packs differ in length, which Megatron's allgather dispatcher does not "
        "support; use --moe-token-dispatcher-type alltoall"
    )
    if args.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"--packed with --context-parallel-size {cp} and experts needs "
            f"--pipeline-model-parallel-size 1, got {args.pipeline_model_parallel_size}: {why}, "
            "or --num-experts 0"
        )
    if cp % ep:
        raise ValueError(
            f"--packed with --context-parallel-size {cp} needs an --expert-model-parallel-size "
            f"that divides it, got {ep}: {why}"
        )
