"""Options for linear layers in FP8, under the names of Megatron's own."""

from __future__ import annotations

import argparse

from training.options_named import flag_of, own_name_of

# mxfp8 needs Blackwell GPUs.
RECIPES = ("tensorwise", "blockwise", "delayed")
# Products in FP8 take tokens in groups of this size.
TOKENS = 16
_NEED_FORMAT = ("fp8_recipe", "first_last_layers_bf16")
_NEED_FIRST_LAST = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    add = parser.add_argument_group(
        "FP8 (TransformerEngine's linear layers, on a GPU)"
    ).add_argument
    add(
        "--fp8-format",
        choices=("e4m3", "hybrid"),
        help="multiply in FP8: e4m3 everywhere, or hybrid: gradients in e5m2 (default: no FP8)",
    )
    add(
        "--fp8-recipe",
        choices=RECIPES,
        help="scales: of whole tensors, of 1x128 and 128x128 blocks, or of the tensors of earlier "
        "iterations (default: tensorwise)",
    )
    text = "keep the first and last layers in bf16; not with --fp8-recipe delayed"
    add("--first-last-layers-bf16", action="store_true", help=text)
    for end in ("start", "end"):
        text = f"layers at the {end} that --first-last-layers-bf16 keeps in bf16 (default: 1)"
        add(f"--num-layers-at-{end}-in-bf16", type=int, metavar="N", help=text)


def check(args: argparse.Namespace) -> None:
    """Refuse FP8 options that cannot work together.

    Raises:
        ValueError: Naming the option, what it got and what it needs.
    """
    for names, needed in ((_NEED_FORMAT, "fp8_format"), (_NEED_FIRST_LAST, _NEED_FORMAT[1])):
        for name in names:
            if getattr(args, name) and not getattr(args, needed):
                raise ValueError(f"{flag_of(name)} needs {flag_of(needed)}")
    if not args.fp8_format:
        return
    if not args.bf16:
        raise ValueError("--fp8-format needs --bf16, the precision of everything else")
    if args.transformer_impl == "local":
        raise ValueError(
            "--fp8-format needs --transformer-impl transformer_engine, got local, whose layers "
            "have no FP8"
        )
    if args.first_last_layers_bf16 and args.fp8_recipe == "delayed":
        raise ValueError(
            "--first-last-layers-bf16 does not go with --fp8-recipe delayed; use tensorwise or "
            "blockwise"
        )
    _check_tokens(args)


def _check_tokens(args: argparse.Namespace) -> None:
    ranks = args.context_parallel_size
    if args.sequence_parallel:
        ranks *= args.tensor_model_parallel_size
    tokens = args.micro_batch_size * args.seq_length
    if tokens % (ranks * TOKENS):
        raise ValueError(
            f"--fp8-format needs {TOKENS * ranks} to divide the tokens of a forward pass, "
            f"--micro-batch-size x {own_name_of(args, '--seq-length')}, got {tokens}"
        )


def fp8_fields(args: argparse.Namespace) -> dict[str, object]:
    """Fields of Megatron's config."""
    if not args.fp8_format:
        return {}
    fields: dict[str, object] = {
        "fp8": args.fp8_format,
        "fp8_recipe": args.fp8_recipe or RECIPES[0],
        "first_last_layers_bf16": args.first_last_layers_bf16,
    }
    # Megatron's default is 1, too.
    return fields | {name: getattr(args, name) for name in _NEED_FIRST_LAST if getattr(args, name)}
