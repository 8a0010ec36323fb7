"""The command line, and Megatron's for each run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from context_parallel_benchmark.arguments import DIMS as DEEPSEEK_DIMS
from context_parallel_benchmark.arguments import (
    add_dims,
    check_files,
    count,
    dims_of,
    list_of,
    new_parser,
    one_of,
    seconds,
)

ATTENTIONS = ("standard", "absorbed")
# Of an H100 or H200, dense bf16, by NVIDIA's datasheet.
PEAK_TFLOPS = 989.4
DIMS = {**DEEPSEEK_DIMS, "hidden-size": 2048}
_SPECS = {
    "absorbed": ("specs.absorbed_mla_layer_specs", "get_absorbed_mla_layer_spec"),
    # Only where there is no TransformerEngine, whose layers Megatron builds without a spec.
    "standard": ("absorbed_mla.testing.standard_mla", "get_standard_mla_layer_spec"),
}


def parse_arguments(argv: Sequence[str], description: str) -> argparse.Namespace:
    """Parse ``argv``.

    Args:
        argv: Without the program's name.
        description: What ``--help`` begins with.

    Raises:
        ValueError: After wrong input.
    """
    parser = new_parser("bench_pretraining.py", description)
    add = parser.add_argument
    add("folder", type=Path, help="where pretraining.json, .md, .png and the logs go")
    add("--render", type=Path, metavar="FILE.json", help="train nothing, render this")
    both = ",".join(ATTENTIONS)
    add("--attentions", type=list_of(one_of(ATTENTIONS)), default=both, help="whose, in turn")
    add("--noise", action="store_true", help="train the first attention twice: how far it repeats")
    add("--iterations", type=count, default=60, help="of a run")
    add("--skip", type=count, default=10, help="first ones, not in the throughput")
    add("--layers", type=count, default=8, help="of the model")
    add("--heads", type=count, default=16, help="of the model")
    add("--ffn-hidden-size", type=count, default=8192, help="width of the MLP")
    add("--vocab-size", type=count, default=32000, help="rows of the embedding")
    add("--seq-length", type=count, default=4096, help="tokens of a sequence")
    add("--micro-batch-size", type=count, default=1, help="sequences of a forward")
    add("--global-batch-size", type=count, default=4, help="sequences of an update")
    add("--learning-rate", type=seconds, default=3e-4, help="the highest")
    add("--gpus", type=count, default=1, help="processes, data-parallel")
    add("--peak-tflops", type=seconds, default=PEAK_TFLOPS, help="of a GPU, for the MFU")
    add("--timeout", type=seconds, default=600.0, help="of one run, in s")
    add("--seed", type=count, default=1234, help="of weights and dropout")
    add(
        "--megatron",
        default="",
        metavar="'--OPTION ...'",
        help="more of Megatron's options, for all runs (default: none)",
    )
    add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.iterations <= args.skip:
        parser.error(f"--iterations must be more than --skip {args.skip}, got {args.iterations}")
    samples = args.micro_batch_size * args.gpus
    if args.global_batch_size % samples:
        parser.error(
            f"--global-batch-size must be a multiple of --micro-batch-size x --gpus = {samples}, "
            f"got {args.global_batch_size}"
        )
    check_files(args.folder, [args.render] if args.render else ())
    return args


def megatron_arguments(args: argparse.Namespace, attention: str, on_gpu: bool) -> list[str]:
    """What Megatron is asked for; all runs get the same but for the attention.

    Args:
        args: The script's.
        attention: One of ``ATTENTIONS``.
        on_gpu: bf16 with TransformerEngine's layers, or fp32 with Megatron's local ones.
    """
    own = [*_model(args), *_training(args), *(_on_gpu() if on_gpu else _on_cpu())]
    if attention == "absorbed" or not on_gpu:
        own += ["--spec", *_SPECS[attention]]
    return own + args.megatron.split()


def _model(args: argparse.Namespace) -> list[str]:
    sizes = {f"--{name}": size for name, size in dims_of(args).items()}
    sizes |= {
        "--num-layers": args.layers,
        "--num-attention-heads": args.heads,
        "--ffn-hidden-size": args.ffn_hidden_size,
        "--vocab-size": args.vocab_size,
        "--seq-length": args.seq_length,
        "--max-position-embeddings": args.seq_length,
        "--rope-type": "rope",
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
    }
    switches = ["--multi-latent-attention", "--qk-layernorm", "--swiglu", "--no-rope-fusion"]
    switches += ["--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    return [*_flat(sizes), *switches]


def _training(args: argparse.Namespace) -> list[str]:
    options = {
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": args.global_batch_size,
        "--train-iters": args.iterations,
        "--lr": args.learning_rate,
        "--min-lr": args.learning_rate / 10,
        "--lr-warmup-iters": max(1, args.iterations // 10),
        "--lr-decay-style": "cosine",
        "--seed": args.seed,
        "--tokenizer-type": "NullTokenizer",
        "--eval-iters": 0,
        "--eval-interval": args.iterations + 1,
        "--log-interval": 1,
    }
    switches = ["--mock-data", "--no-create-attention-mask-in-dataloader", "--log-throughput"]
    # The first needs apex, the second looks for a logging package of NVIDIA's.
    switches += ["--no-gradient-accumulation-fusion", "--no-one-logger"]
    return [*_flat(options), *switches]


def _on_gpu() -> list[str]:
    return ["--bf16", "--transformer-impl", "transformer_engine"]


def _on_cpu() -> list[str]:
    switches = ["--no-persist-layer-norm", "--no-masked-softmax-fusion", "--use-cpu-initialization"]
    options = {"--transformer-impl": "local", "--distributed-backend": "gloo", "--num-workers": 0}
    # Clipping looks at the type's name, which says "cuda".
    return [*_flat(options | {"--clip-grad": 0}), *switches]


def _flat(options: dict) -> list[str]:
    return [str(part) for pair in options.items() for part in pair]
