"""The model of a checkpoint: whether it can run here, and loading it."""

from __future__ import annotations

import argparse
import sys

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from absorbed_mla.checkpoint.distributed import load_model_weights
from absorbed_mla.serving.scheduler.cuda_graphs import model_fields, seed_generators
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer
from console.ranks import rank
from training.arguments import set_vocabulary
from training.checkpoint import find_checkpoint
from training.model import build_gpt, model_config
from training.rules import device, how_to_pad, refuse, split_sizes

# Usual number of rows of an embedding without a token: padding, and rows that models reserve.
_USUAL_PADDING = 1024


def set_rows(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Set the number of rows of the embedding.

    Raises:
        ValueError: If the tokenizer has more tokens.
    """
    rows, tokens = args.model_vocab_size, tokenizer.vocab_size
    if args.use_checkpoint_args and rows < tokens:
        raise ValueError(
            f"{_name_of_tokenizer(args)} has {tokens} tokens, but the model in {args.load} {rows}; "
            "give the --tokenizer that the model was trained with"
        )
    set_vocabulary(args, tokens)


def warn_of_small_tokenizer(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Print a warning if the tokenizer seems to be another model's."""
    rows, tokens = args.padded_vocab_size, tokenizer.vocab_size
    if rows > 2 * tokens + _USUAL_PADDING and not rank():
        print(
            f"generate.py: warning: {_name_of_tokenizer(args)} has {tokens} tokens, but the model "
            f"{rows}; it was probably trained with another --tokenizer",
            file=sys.stderr,
            flush=True,
        )


def _name_of_tokenizer(args: argparse.Namespace) -> str:
    return f"the tokenizer in {args.tokenizer}" if args.tokenizer else "bytes (no --tokenizer)"


def check_model(args: argparse.Namespace) -> None:
    """Check that the model can be divided over the ranks, and run on this machine.

    Raises:
        ValueError: Naming the size or the option that does not fit.
    """
    tp = args.tensor_model_parallel_size
    for name in (*split_sizes(args), "padded_vocab_size"):
        size = getattr(args, name) or 0
        if size % tp:
            remedy = f". {how_to_pad(args.load, tp)}" if "vocab" in name else ""
            raise ValueError(
                f"the model's {name.removeprefix('padded_')} {size} cannot be divided by the "
                f"number of processes {tp}{remedy}"
            )
    longest, given = args.max_position_embeddings, args.max_sequence_length
    if given is not None and given > longest:
        raise ValueError(
            f"--max-sequence-length must be at most the model's --max-position-embeddings "
            f"{longest}, got {given}"
        )
    check_graphs(args)
    refuse(device(args))


def check_graphs(args: argparse.Namespace) -> None:
    """Check that CUDA graphs can be captured, if ``--cuda-graphs`` asks for them.

    Megatron handles tensor and sequence parallelism: it captures only sizes that the ranks divide,
    and allocates the buffer of gathered tokens at its full size before the first capture.
    """
    if not args.cuda_graphs:
        return
    if not torch.cuda.is_available():
        raise ValueError("--cuda-graphs needs a GPU, and there is none here; leave it out")
    if args.form == "expanded":
        raise ValueError(
            "--cuda-graphs needs --form auto or absorbed, got expanded, whose work depends on the "
            "lengths of a step"
        )
    # The default on a GPU is the other one.
    allgather = "--moe-token-dispatcher-type" in args.given and args.moe_token_dispatcher_type
    if args.num_experts and allgather == "allgather":
        raise ValueError(
            "--cuda-graphs of a model with experts needs --moe-token-dispatcher-type alltoall, got "
            "allgather, which reads on the host how many tokens each expert has"
        )


def load_model(args: argparse.Namespace, device: torch.device) -> GPTModel:
    """This rank's part of the model in ``--load``, in evaluation mode; collective.

    Raises:
        ValueError: If the checkpoint does not hold this model, or Megatron refuses the options.
    """
    graphs = model_fields(bool(args.num_experts)) if args.cuda_graphs else {}
    if args.cuda_graphs:
        seed_generators(args.seed, graphs=True)
    config = model_config(args, args.attention_options, cache_mla_latents=True, **graphs)
    gpt = build_gpt(config, device)
    if args.bf16 or args.fp16:
        # Rounds the parameters, except those that Megatron keeps in fp32.
        gpt = Float16Module(gpt.config, gpt).module
    path = find_checkpoint(args.load)
    try:
        load_model_weights(gpt, path)
    except CheckpointingException as error:
        raise ValueError(f"--load: {path} cannot be read: {error}") from error
    return gpt.eval()
