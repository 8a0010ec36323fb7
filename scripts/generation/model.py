"""The model of a checkpoint: whether it can run here, and loading it."""

from __future__ import annotations

import argparse
import sys

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from absorbed_mla.serving.scheduler.cuda_graphs import model_fields, seed_generators
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer
from training import distributed
from training.checkpoint import load_weights
from training.model import absorbed_gpt, build_config
from training.model_options import padded_vocab_size, token_dispatcher
from training.parallelism import how_to_pad
from training.presets import ModelPreset
from training.validation import check_device

# Usual number of rows of an embedding without a token: padding, and rows that models reserve.
_USUAL_PADDING = 1024


def vocab_size(args: argparse.Namespace, model: ModelPreset, tokenizer: Tokenizer) -> int:
    """Number of rows of the embedding.

    Raises:
        ValueError: If the tokenizer has more tokens.
    """
    rows, tokens = model.vocab_size, tokenizer.vocab_size
    if not args.use_checkpoint_args:
        rows = padded_vocab_size(args, model, tokens)
    if rows < tokens:
        raise ValueError(
            f"{_name_of_tokenizer(args)} has {tokens} tokens, but the model in {args.load} {rows}; "
            "give the --tokenizer that the model was trained with"
        )
    return rows


def warn_of_small_tokenizer(
    args: argparse.Namespace, model: ModelPreset, tokenizer: Tokenizer
) -> None:
    """Print a warning if the tokenizer seems to be another model's."""
    rows, tokens = model.vocab_size, tokenizer.vocab_size
    if rows > 2 * tokens + _USUAL_PADDING and not distributed.rank():
        print(
            f"generate.py: warning: {_name_of_tokenizer(args)} has {tokens} tokens, but the model "
            f"{rows}; it was probably trained with another --tokenizer",
            file=sys.stderr,
            flush=True,
        )


def _name_of_tokenizer(args: argparse.Namespace) -> str:
    return f"the tokenizer in {args.tokenizer}" if args.tokenizer else "bytes (no --tokenizer)"


def check_model(args: argparse.Namespace, model: ModelPreset) -> None:
    """Check that the model can be divided over the ranks, and run on this machine.

    Raises:
        ValueError: Naming the size or the option that does not fit.
    """
    tp = args.tensor_model_parallel_size
    names = ["num_attention_heads", "ffn_hidden_size", "vocab_size"]
    if model.num_moe_experts:
        names += ["moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"]
    for name in names:
        size = getattr(model, name) or 0
        if size % tp:
            remedy = f". {how_to_pad(args.load, tp)}" if name == "vocab_size" else ""
            raise ValueError(
                f"the model's {name} {size} cannot be divided by the number of processes {tp}"
                f"{remedy}"
            )
    longest, given = model.max_position_embeddings, args.max_sequence_length
    if given is not None and given > longest:
        raise ValueError(
            f"--max-sequence-length must be at most the model's --max-position-embeddings "
            f"{longest}, got {given}"
        )
    check_graphs(args, model)
    check_device(args)


def check_graphs(args: argparse.Namespace, model: ModelPreset) -> None:
    """Check that CUDA graphs can be captured, if ``--cuda-graphs`` asks for them.

    Megatron handles tensor and sequence parallelism: it captures only sizes that the ranks divide,
    and allocates the buffer of gathered tokens at its full size before the first capture.

    Raises:
        ValueError: Naming the option that does not go with it, and what does.
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
    dispatcher = token_dispatcher(args, "cuda")
    if model.num_moe_experts and dispatcher != "alltoall":
        raise ValueError(
            "--cuda-graphs of a model with experts needs --moe-token-dispatcher-type alltoall, got "
            f"{dispatcher}, which reads on the host how many tokens each expert has"
        )


def load_model(args: argparse.Namespace, model: ModelPreset, device: torch.device) -> GPTModel:
    """This rank's part of the model in ``--load``, in evaluation mode; collective.

    Raises:
        ValueError: If the checkpoint does not hold this model, or Megatron refuses the options.
    """
    graphs = model_fields(bool(model.num_moe_experts)) if args.cuda_graphs else {}
    config = build_config(args, model, device, **graphs)
    if args.cuda_graphs:
        seed_generators(args.seed, graphs=True)
    gpt = absorbed_gpt(config, model, args.attention_options, device)
    if args.bf16 or args.fp16:
        # Rounds the parameters, except those that Megatron keeps in fp32.
        gpt = Float16Module(config, gpt).module
    load_weights(gpt, args.load)
    return gpt.eval()
