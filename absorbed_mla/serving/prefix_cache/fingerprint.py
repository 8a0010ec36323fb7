"""The fingerprint of a prefix cache: a hash of what latents depend on (weights, options)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE

# Words of a weight that are summed up at a time: 32 MiB, and as much again for products.
_CHUNK = 2**22
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


def fingerprint(model: nn.Module) -> str:
    """32 hexadecimal digits that differ between ranks' pipeline stages; collective over the model.

    Weights are read once, on their device. Every weight of every rank counts, because latents
    depend on all layers before them; so do all plain fields of the config, the attention's
    options, sizes of parallelism, the device and PyTorch's version, because bits may depend on
    them.
    """
    group = parallel_state.get_model_parallel_group()
    own = weights_digest(model)
    digests: list[str] = [own] * group.size()
    if group.size() > 1:
        dist.all_gather_object(digests, own, group=group)
    device = next(model.parameters()).device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    stage = parallel_state.get_pipeline_model_parallel_rank()
    place = f"stage {stage}, blocks of {BLOCK_SIZE}, {machine}, torch {torch.__version__}"
    text = "\n".join([*digests, *_fields(model.config), *_options(model), place])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weights_digest(model: nn.Module) -> str:
    """A digest of the names, shapes and bits of this rank's parameters and buffers.

    A weight is read as words of 64 bits, each of which is multiplied by an odd number of its own;
    the sums are exact modulo 2^64, so one changed word always changes them. It is no protection
    against somebody who wants two models to have the same digest.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    described = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    longest = max((tensor.nbytes for _, tensor in tensors), default=0) // 8 + 1
    odd = _odd_numbers(min(longest, _CHUNK), next(model.parameters()).device)
    sums = [
        (words * odd[: len(words)].to(words.device)).sum().to(odd.device)
        for _, tensor in tensors
        for words in _words(tensor).split(_CHUNK)
    ]
    # One wait for the device.
    numbers = torch.stack(sums).tolist()
    return hashlib.sha256(repr((described, numbers)).encode()).hexdigest()


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as int64, with zeros behind them where needed."""
    tensor = tensor.detach()
    if type(tensor) not in (Tensor, nn.Parameter):
        tensor = tensor.float()  # such as FP8 weights, which have no bits of their own
    flat = tensor.contiguous().flatten().view(torch.uint8)
    if len(flat) % 8:
        flat = nn.functional.pad(flat, (0, -len(flat) % 8))
    elif flat.storage_offset() % 8:  # in the middle of a buffer of DDP
        flat = flat.clone()
    return flat.view(torch.int64)


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers, int64 [count]."""
    number = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in (-7046029254386353131, -4658895280553007687):
        number = number * factor
        number = number ^ (number >> 29)
    return number * 2 + 1


def _fields(config: Any) -> Iterator[str]:
    """Fields of a config whose values are plain, or functions."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if _is_plain(value):
            yield f"{field.name}={value!r}"
        elif isinstance(value, Callable):
            yield f"{field.name}={getattr(value, '__qualname__', type(value).__name__)}"


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _options(model: nn.Module) -> Sequence[str]:
    """Options of the attention layers."""
    found = (getattr(module, "options", None) for module in model.modules())
    return sorted({repr(one) for one in found if isinstance(one, AbsorbedMLAOptions)})
