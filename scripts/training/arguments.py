"""The command line of train.py. Options have Megatron's names where Megatron has them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from absorbed_mla.options import CP_COMM_TYPES, DOWN_PROJECTIONS, FORMS
from console.parser import Parser
from training import fp8, sparse_options
from training.model_options import NOT_WITH_CHECKPOINT_ARGS
from training.options_named import flag_of, given_options
from training.presets import PRESETS

DECAY_STYLES = ("constant", "cosine", "linear")
# Fields of ModelPreset that have an option, with its type and help.
_SIZES = (
    ("num_layers", int, "number of transformer layers"),
    ("hidden_size", int, "width of the hidden states"),
    ("ffn_hidden_size", int, "width of the MLP in dense layers"),
    ("num_attention_heads", int, "number of attention heads"),
    ("q_lora_rank", int, "width of the compressed query; 0: queries are not compressed"),
    ("kv_lora_rank", int, "width of the latent that keys and values are computed from"),
    ("qk_head_dim", int, "width of a head's query and key without the RoPE part"),
    ("qk_pos_emb_head_dim", int, "width of the RoPE part of a head's query and key"),
    ("v_head_dim", int, "width of a head's value"),
    ("max_position_embeddings", int, "longest sequence that the model accepts"),
    ("layernorm_epsilon", float, "epsilon of the RMS norms outside the attention"),
    ("latent_norm_eps", float, "epsilon of the RMS norms inside the attention"),
    ("rotary_base", float, "base of RoPE's frequencies"),
    ("rotary_scaling_factor", float, "factor by which YaRN extends the sequence length"),
    ("mscale", float, "YaRN's mscale, which scales cos and sin"),
    ("mscale_all_dim", float, "YaRN's mscale_all_dim, which scales the softmax"),
)
_MOE_SIZES = (
    ("num_moe_experts", int, "experts in each MoE layer; 0: a dense model"),
    ("moe_ffn_hidden_size", int, "width of an expert"),
    (
        "moe_shared_expert_intermediate_size",
        int,
        "total width of the shared experts; 0: no shared experts",
    ),
    ("moe_router_topk", int, "experts that each token is sent to"),
    ("moe_aux_loss_coeff", float, "weight of the loss that balances the experts"),
)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse ``argv``; checks types, choices and options that exclude each other, nothing else.

    Returns:
        The options; ``given`` has the names of those on the command line.

    Raises:
        ValueError: If an option is unknown, has no such value, or excludes another.
    """
    parser = Parser(
        "train.py", "Train a GPT with multi-head latent attention. Start it with torchrun."
    )
    _add_model(parser)
    _add_attention(parser)
    sparse_options.add_options(parser)
    _add_moe(parser)
    _add_parallel(parser)
    _add_training(parser)
    _add_data(parser)
    _add_io(parser)
    args = parser.parse_args(argv)
    args.given = given_options(argv)
    if args.use_checkpoint_args:
        _check_checkpoint_args(args)
    return args


def _check_checkpoint_args(args: argparse.Namespace) -> None:
    if not args.load:
        raise ValueError("--use-checkpoint-args needs --load, the checkpoint to read them from")
    # A checkpoint without an indexer does not say what a new one is like.
    free = sparse_options.flags() if args.new_indexer else set()
    twice = [flag for flag in NOT_WITH_CHECKPOINT_ARGS if flag in args.given]
    excluded = [flag for flag in twice if flag not in free]
    if excluded:
        raise ValueError(
            f"--use-checkpoint-args takes the model from --load and excludes {', '.join(excluded)};"
            " give one or the other"
        )


def _add_numbers(add: Callable, *rows: tuple[str, type, float | None, str]) -> None:
    """Add options with a number as their value: name, type, default, help."""
    for flag, kind, default, text in rows:
        metavar = "N" if kind is int else "X"
        add(flag, type=kind, default=default, metavar=metavar, help=text)


def _add_switches(add: Callable, *rows: tuple[str, str]) -> None:
    """Add options without a value: name, help."""
    for flag, text in rows:
        add(flag, action="store_true", help=text)


def _add_sizes(add: Callable, sizes: tuple[tuple[str, type, str], ...]) -> None:
    for name, kind, text in sizes:
        metavar, text = "N" if kind is int else "X", f"{text} (default: the preset's)"
        add(flag_of(name), dest=name, type=kind, metavar=metavar, help=text)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    text = "take the model's sizes from the checkpoint in --load, not from the options below"
    _add_switches(add, ("--use-checkpoint-args", text))
    add("--preset", default="tiny", help=f"the model: {', '.join(PRESETS)}")
    text = (
        "divide the widths, layers and experts of the preset by N, and the top-k of an indexer, "
        "which becomes at most a quarter of --seq-length"
    )
    _add_numbers(add, ("--scale-down", int, 1, text))
    _add_sizes(add, _SIZES)
    add("--rope-type", choices=("rope", "yarn"), help="rotary embedding (default: the preset's)")
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="size of the vocabulary before padding (default: the tokenizer's; with the preset of "
        "a released model and no --scale-down, that model's)",
    )
    _add_numbers(
        add,
        ("--make-vocab-size-divisible-by", int, 64, "pad the vocabulary to a multiple of N"),
        ("--init-method-std", float, 0.02, "standard deviation of the initial weights"),
        ("--attention-dropout", float, 0.0, "dropout probability of the attention weights"),
        ("--hidden-dropout", float, 0.0, "dropout probability after attention and MLP"),
    )


def _add_attention(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("attention").add_argument
    add(
        "--attention",
        choices=("absorbed", "standard"),
        default="absorbed",
        help="absorbed: this package's; standard: Megatron's MLASelfAttention, to compare with",
    )
    add(
        "--form",
        choices=FORMS,
        default="auto",
        help="form in which absorbed MLA is computed; auto: the one estimated to be fastest",
    )
    add(
        "--down-projection",
        choices=DOWN_PROJECTIONS,
        default="duplicated",
        help="whether tensor-parallel ranks hold copies of the down-projections or split them",
    )
    add(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        help="linear layers and norms of Megatron or of TransformerEngine (default: "
        "transformer_engine if it is installed and there is a GPU, else local)",
    )


def _add_moe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("mixture of experts").add_argument
    add(
        "--moe-layer-freq",
        metavar="N|LIST",
        help="which layers have experts: every N-th, or those with a 1 in a list such as "
        "([0]*1+[1]*2) (default: the preset's)",
    )
    _add_sizes(add, _MOE_SIZES)
    add(
        "--moe-token-dispatcher-type",
        choices=("allgather", "alltoall"),
        help="how tokens are sent to experts on other ranks (default: alltoall on a GPU or with "
        "--expert-model-parallel-size, else allgather)",
    )
    text = "compute all experts of a rank in one grouped matrix product; GPU only"
    _add_switches(add, ("--moe-grouped-gemm", text))


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("parallelism and recomputation").add_argument
    _add_numbers(
        add,
        ("--tensor-model-parallel-size", int, 1, "ranks that share heads and MLP widths"),
        ("--pipeline-model-parallel-size", int, 1, "ranks that share the layers"),
        ("--expert-model-parallel-size", int, 1, "ranks that share the experts"),
        ("--context-parallel-size", int, 1, "ranks that share the tokens of each sequence"),
    )
    add(
        "--cp-comm-type",
        nargs="+",
        default=["all_gather"],
        metavar="TYPE",
        help=f"how context-parallel ranks exchange latents: {', '.join(CP_COMM_TYPES)} or auto "
        "(all_gather where its memory allows it), one for all layers or one for each layer "
        "(default: all_gather)",
    )
    _add_switches(
        add,
        ("--sequence-parallel", "split the tokens between layers over tensor-parallel ranks"),
        ("--overlap-grad-reduce", "reduce gradients over ranks during the backward pass"),
    )
    add(
        "--recompute-granularity",
        choices=("selective", "full"),
        help="recompute parts of layers, or whole layers, in the backward pass",
    )
    add(
        "--recompute-modules",
        nargs="+",
        metavar="MODULE",
        help="with selective: what to recompute, such as core_attn, mla_up_proj, mlp, moe "
        "(default: core_attn)",
    )
    add(
        "--recompute-method",
        choices=("uniform", "block"),
        help="with full: recompute all layers, or the first ones of each pipeline stage",
    )
    text = "with uniform: layers recomputed together; with block: layers recomputed"
    _add_numbers(add, ("--recompute-num-layers", int, None, text))


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _add_numbers(
        group.add_argument,
        ("--seq-length", int, 128, "tokens in a sequence"),
        ("--micro-batch-size", int, None, "sequences in a forward pass (default: 8; packed: 1)"),
        (
            "--global-batch-size",
            int,
            None,
            "sequences in an iteration (default: --micro-batch-size x data-parallel ranks x "
            "pipeline stages)",
        ),
        ("--train-iters", int, 200, "iterations, one optimizer step each"),
        ("--exit-interval", int, None, "save and stop at the next iteration divisible by N"),
        ("--lr", float, 2e-3, "maximum learning rate"),
        ("--min-lr", float, None, "learning rate after the decay (default: a tenth of --lr)"),
        ("--lr-warmup-iters", int, 10, "iterations of linear warm-up to --lr"),
        ("--lr-decay-iters", int, None, "iteration that ends the decay (default: --train-iters)"),
        ("--weight-decay", float, 0.1, "weight decay of AdamW"),
        ("--adam-beta1", float, 0.9, "beta1 of AdamW"),
        ("--adam-beta2", float, 0.95, "beta2 of AdamW"),
        ("--adam-eps", float, 1e-8, "epsilon of AdamW"),
        ("--clip-grad", float, 1.0, "maximum gradient norm; 0: no clipping"),
        ("--qk-clip-threshold", float, 100.0, "largest attention score that --qk-clip allows"),
        ("--qk-clip-alpha", float, 0.5, "share of the query in --qk-clip's scaling of q_nope"),
        ("--seed", int, 1234, "seed of weights, data order and dropout"),
    )
    group.add_argument(
        "--lr-decay-style",
        choices=DECAY_STYLES,
        default="cosine",
        help="shape of the decay from --lr to --min-lr",
    )
    _add_switches(
        group.add_argument,
        ("--qk-clip", "scale query and key weights of heads with larger scores after each step"),
        (
            "--log-max-attention-logit",
            "report the exact largest attention score of each iteration",
        ),
    )
    _add_switches(
        group.add_mutually_exclusive_group().add_argument,
        ("--bf16", "compute in bf16 instead of fp32"),
        ("--fp16", "compute in fp16; GPU only"),
    )
    fp8.add_options(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    text = "text file, or folder of them (default: the sources of Python's standard library)"
    add("--data", metavar="PATH", help=text)
    text = "Hugging Face tokenizer (default: every byte is a token)"
    add("--tokenizer", metavar="FOLDER", help=text)
    text = "run Python code of the tokenizer's folder, if the tokenizer needs it"
    _add_switches(add, ("--trust-remote-code", text))
    add("--split", default="95,5", help="percentages of the tokens for training and validation")
    _add_switches(add, ("--packed", "make each document a sequence of its own, packed as thd"))


def _add_io(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints, validation and reports").add_argument
    add("--load", metavar="FOLDER", help="checkpoint to resume, or to take the weights from")
    _add_switches(add, ("--finetune", "take only the weights from --load; start at iteration 0"))
    add("--save", metavar="FOLDER", help="folder for checkpoints (default: none are saved)")
    _add_numbers(
        add,
        ("--save-interval", int, None, "also save every N iterations (default: only at the end)"),
        ("--eval-interval", int, 100, "compute the validation loss every N iterations"),
        ("--eval-iters", int, 4, "batches for the validation loss; 0: no validation"),
        ("--log-interval", int, 10, "print every N iterations"),
    )
    add("--metrics", metavar="FILE", help="write one JSON line per iteration to this file")
    add("--plot", metavar="FILE", help="draw the losses into this PNG")
