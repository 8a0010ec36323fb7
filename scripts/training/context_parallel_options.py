"""What context parallelism asks of the other options."""

from __future__ import annotations

import argparse

from absorbed_mla.options import CP_COMM_TYPES
from training.options_named import name_of, own_name_of


def cp_comm_type(args: argparse.Namespace) -> str | list[str]:
    """``--cp-comm-type`` as Megatron's config has it: one for all layers, or a list."""
    types = args.cp_comm_type
    return types[0] if len(types) == 1 else list(types)


def lengths_vary(args: argparse.Namespace) -> bool:
    """Whether pipeline stages have to tell each other how long a pack is: padding makes it vary."""
    return is_padded(args) and args.pipeline_model_parallel_size > 1


def is_padded(args: argparse.Namespace) -> bool:
    """Whether documents are padded, to be cut."""
    return args.packed and args.context_parallel_size > 1


def transformer_impl(args: argparse.Namespace, device_type: str) -> str:
    """``--transformer-impl``, or its default on this machine."""
    if args.transformer_impl is not None:
        return args.transformer_impl
    if device_type != "cuda":
        return "local"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return "transformer_engine" if HAVE_TE else "local"


def token_dispatcher(args: argparse.Namespace, device_type: str) -> str:
    """``--moe-token-dispatcher-type``, or its default on this machine."""
    if args.moe_token_dispatcher_type is not None:
        return args.moe_token_dispatcher_type
    return "alltoall" if device_type == "cuda" else "allgather"


def check_context_parallelism(args: argparse.Namespace) -> None:
    """Refuse what cannot be cut over context-parallel ranks, or not exactly.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    _check_comm_types(args)
    if args.context_parallel_size == 1:
        return
    # Only here: it takes seconds, and most command lines do without.
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
            "Megatron's local attention exchanges no keys; --attention absorbed does"
        )


def _check_comm_types(args: argparse.Namespace) -> None:
    types, layers = args.cp_comm_type, args.model.num_layers
    for name in types:
        if name not in CP_COMM_TYPES:
            raise ValueError(
                f"--cp-comm-type must be one of {', '.join(CP_COMM_TYPES)}, got {name!r}: a2a and "
                "a2a+p2p cut keys by heads, and the latent is one head for all"
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
    """Packs of different context-parallel groups have different lengths once they are padded."""
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    if not args.model.num_moe_experts or dispatcher != "allgather":
        return
    why = (
        "packs padded for it differ in length, which Megatron's allgather dispatcher does not "
        "support; use --moe-token-dispatcher-type alltoall (on a GPU)"
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
