"""The model of a checkpoint: whether it can run here, and loading it."""

from __future__ import annotations

import argparse

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from absorbed_mla.generation.cuda_graphs import model_fields, seed_generators
from training.absorbed_model import absorbed_gpt, load_weights
from training.model import build_config
from training.model_options import token_dispatcher
from training.presets import ModelPreset


def check_model(args: argparse.Namespace, model: ModelPreset) -> None:
    """Check that the model can be divided over the ranks, and run on this machine.

    Raises:
        ValueError: Naming the size or the option that does not fit.
    """
    tp = args.tensor_model_parallel_size
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "vocab_size": model.vocab_size,
    }
    if model.num_moe_experts:
        sizes["moe_ffn_hidden_size"] = model.moe_ffn_hidden_size
        sizes["moe_shared_expert_intermediate_size"] = (
            model.moe_shared_expert_intermediate_size or 0
        )
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(
                f"the model's {name} {size} cannot be divided by the number of processes {tp}"
            )
    check_graphs(args, model)
    if torch.cuda.is_available():
        return
    if args.fp16:
        raise ValueError("--fp16 needs a GPU, and there is none here; use --bf16, or fp32")
    if args.transformer_impl == "transformer_engine":
        raise ValueError("--transformer-impl transformer_engine needs a GPU; use local")
    if args.moe_grouped_gemm:
        raise ValueError("--moe-grouped-gemm needs a GPU; leave it out")
    if args.moe_token_dispatcher_type == "alltoall":
        raise ValueError("--moe-token-dispatcher-type alltoall needs a GPU; use allgather")


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
    graphs = model_fields(model.num_moe_experts) if args.cuda_graphs else {}
    config = build_config(args, model, device, **graphs)
    if args.cuda_graphs:
        seed_generators(args.seed, graphs=True)
    gpt = absorbed_gpt(config, model, args.options, device)
    if args.bf16 or args.fp16:
        # Rounds the parameters, except those that Megatron keeps in fp32.
        gpt = Float16Module(config, gpt).module
    load_weights(gpt, args.load)
    return gpt.eval()
