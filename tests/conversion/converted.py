"""Converted models of transformers under tensor parallelism: on rank 0's disk, loaded by all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.checkpoint.distributed import load_model_weights
from checkpoint_conversion.checkpoint_folder import weights_folder
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.logits import ATTENTION, megatron_logits, megatron_model
from tests.conversion.models import (
    VOCABULARY,
    Architecture,
    logits_of,
    make_model,
    save,
    token_batch,
)
from tests.support import world


@contextmanager
def converted(architecture: Architecture, to: str) -> Iterator[tuple[Path, Tensor, Tensor]]:
    """A converted checkpoint that all processes see, tokens, and transformers' logits of them."""
    tokens = token_batch()
    expected = torch.empty(*tokens.shape, VOCABULARY)
    name = [tempfile.mkdtemp(prefix="converted_") if world.rank() == 0 else None]
    if world.rank() == 0:
        model = make_model(architecture)
        expected = logits_of(model, tokens).contiguous()
        convert(save(model, Path(name[0]) / "hf"), Path(name[0]) / to, to)
    dist.broadcast_object_list(name)
    dist.broadcast(expected, src=0)
    try:
        yield Path(name[0]) / to, tokens, expected
    finally:
        dist.barrier()
        if world.rank() == 0:
            shutil.rmtree(name[0])


def loaded_logits(folder: Path, tokens: Tensor) -> Tensor:
    """What all processes compute together with the weights that Megatron's loader gives them."""
    checkpoint = open_checkpoint(folder)
    model = megatron_model(
        checkpoint.config, ATTENTION[checkpoint.format], tensor_parallel=world.size()
    )
    load_model_weights(model, weights_folder(folder))
    return megatron_logits(model, tokens)
