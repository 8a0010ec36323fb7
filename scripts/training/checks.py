"""Check a command line before any work; what Megatron says clearly itself is left to it."""

from __future__ import annotations

import argparse
import os

from megatron.core.extensions.transformer_engine import HAVE_TE

from training import rules
from training.megatron_loop import ON_CPU, validate_args
from training.refusals import parse_split


def validate_arguments(args: argparse.Namespace) -> None:
    """Refuse options that cannot work, and fill in defaults that depend on other options.

    Args:
        args: Of :func:`~training.arguments.parse_arguments`; afterwards as Megatron's
            ``validate_args`` leaves it.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    rules.refuse(rules.ranges(args))
    complete(args)
    for group in (
        *(rules.parallelism, rules.batch, rules.precision, rules.device),
        *(rules.context_parallelism, rules.training),
    ):
        rules.refuse(group(args))
    args.split_percent = parse_split(args.split)
    validate_by_megatron(args)


def complete(args: argparse.Namespace) -> None:
    """Defaults that depend on other options, and on the machine."""
    given, stages = args.given, args.pipeline_model_parallel_size
    shared = args.tensor_model_parallel_size * stages
    args.data_parallel = args.world_size // (shared * args.context_parallel_size)
    if args.micro_batch_size is None:
        args.micro_batch_size = 1 if args.packed else 8
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel * stages
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
    # Padded packs differ in length, so pipeline stages must send each other the lengths.
    args.variable_seq_lengths = rules.is_padded(args) and stages > 1
    if "--moe-token-dispatcher-type" not in given:
        # While generating, ranks that share experts have different numbers of tokens. And Megatron
        # refuses the other one with packs of different lengths, even without experts.
        alltoall = not ON_CPU or args.expert_model_parallel_size > 1
        alltoall |= not args.num_experts and args.variable_seq_lengths
        args.moe_token_dispatcher_type = "alltoall" if alltoall else "allgather"
    if args.experimental_attention_variant is not None:
        # What "auto" takes with sparse attention. Megatron's config accepts no other name.
        args.cp_comm_type = ["all_gather" if x == "auto" else x for x in args.cp_comm_type]
    args.use_cpu_initialization = args.use_cpu_initialization or ON_CPU
    if ON_CPU:
        args.distributed_backend = "gloo"


def validate_by_megatron(args: argparse.Namespace) -> None:
    """Megatron's own checks and derived arguments, without its prints."""
    if args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Our layers do without TransformerEngine's scores, and packs are padded to a length that
    # context-parallel ranks can cut.
    names = ("qk_clip", "log_max_attention_logit", "seq_length", "variable_seq_lengths")
    ours = {name: getattr(args, name) for name in names}
    args.qk_clip = args.log_max_attention_logit = False
    if rules.is_padded(args):
        args.seq_length += -args.seq_length % (2 * args.context_parallel_size)
        args.max_position_embeddings = max(args.max_position_embeddings, args.seq_length)
    validate_args(args)
    vars(args).update(ours)
    args._is_global_batch_size_explicitly_specified = True
