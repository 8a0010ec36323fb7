"""Attention of others on the inputs of ours, causal, each keeping the LSE for its backward.

A function of ``FUNCTIONS`` gets the operands and the scale, and returns the attention, a function
without arguments, and the tensors that it needs gradients of. Queries, keys and values lie as
[S, B, N, D] as in Megatron, and in no other order of memory.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from absorbed_mla.core_attention.types import AttentionInputs
from attention_benchmark.row import Refused

# What PyTorch raises where its backend refuses.
_NO_KERNEL = ("No available kernel", "No viable backend")
# In its warnings: headings, and that the other backends are switched off.
_OF_OTHERS = ("not used because", "runtime disabled")

# What TransformerEngine raises where all its attentions refuse.
_TE_HAS_NONE = "No dot product attention backend"

Attend = Callable[[], Tensor]
Built = tuple[Attend, tuple[Tensor, ...]]


def _joined(operands: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Query [S, B, N, K], key [S, B, N or 1, K] and value [S, B, N or 1, V], leaves of autograd.

    The latent's value is a view of its key.
    """
    if operands.value is not None:
        q, k, v = (x.detach().requires_grad_() for x in operands.as_multi_head())
        return q, k, v
    q_content, q_rope, latent, k_rope, _ = operands
    q = torch.cat((q_content, q_rope), dim=-1).requires_grad_()
    k = torch.cat((latent, k_rope.unsqueeze(2)), dim=-1).requires_grad_()
    return q, k, k[..., : latent.shape[-1]]


def _value(k: Tensor, v: Tensor) -> Tensor:
    """``v``, anew where it is a view of the key: backward of the last call freed its graph."""
    return v if v.is_leaf else k[..., : v.shape[-1]]


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x.is_leaf)


def torch_sdpa(backend: SDPBackend, operands: AttentionInputs, scale: float) -> Built:
    """PyTorch's scaled_dot_product_attention with one of its backends, [B, N, S, D] views."""
    q, k, v = _joined(operands)

    def attend() -> Tensor:
        heads, key, value = (
            x.expand(-1, -1, q.shape[2], -1).permute(1, 2, 0, 3) for x in (q, k, _value(k, v))
        )
        with sdpa_kernel([backend]):
            out = F.scaled_dot_product_attention(heads, key, value, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3)

    _refuse_as_torch_does(attend)
    return attend, _leaves(q, k, v)


def _refuse_as_torch_does(attend: Attend) -> None:
    """Raise why PyTorch's backend does not take these inputs, which it warns about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend()
        except RuntimeError as error:
            if not any(words in str(error) for words in _NO_KERNEL):
                raise
            reasons = [str(one.message).split(" (Triggered internally")[0] for one in caught]
            own = [text for text in reasons if not any(words in text for words in _OF_OTHERS)]
            raise Refused("; ".join(own) or "this device has no such kernel") from None


def transformer_engine(operands: AttentionInputs, scale: float) -> Built:
    """TransformerEngine's fused attention (cuDNN's), by its DotProductAttention."""
    module = _import("transformer_engine.pytorch", "TransformerEngine")
    q, k, v = _joined(operands)
    with only_fused():
        attention = module.DotProductAttention(
            q.shape[2],
            (q.shape[3], v.shape[3]),
            num_gqa_groups=k.shape[2],
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
            softmax_scale=scale,
        )

    def attend() -> Tensor:
        try:
            with only_fused():
                return attention(q, k, _value(k, v))
        except ValueError as error:
            if _TE_HAS_NONE not in str(error):
                raise
            raise Refused("cuDNN's attention does not take this, says TransformerEngine") from None

    return attend, _leaves(q, k, v)


@contextmanager
def only_fused() -> Iterator[None]:
    """Let TransformerEngine take no attention but cuDNN's."""
    wanted = {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
    former = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def flash_attention(module: str, operands: AttentionInputs, scale: float) -> Built:
    """FlashAttention-3 or 4, [B, S, N, D]; the latent as its value, with ``qv``."""
    function = _import(module, module).flash_attn_func
    if operands.value is not None:
        q, k, v = _joined(operands)
        return _batch_first(function, (q, k, v), {}, scale), (q, k, v)
    q, qv = (x.detach().clone().requires_grad_() for x in (operands.q_rope, operands.q_content))
    k = operands.k_rope.unsqueeze(2).detach().clone().requires_grad_()
    v = operands.k_content.detach().clone().requires_grad_()
    return _batch_first(function, (q, k, v), {"qv": qv}, scale), (q, qv, k, v)


def _batch_first(
    function: Callable, inputs: tuple[Tensor, ...], more: dict[str, Tensor], scale: float
) -> Attend:
    def attend() -> Tensor:
        extra = {name: x.transpose(0, 1) for name, x in more.items()}
        swapped = (x.transpose(0, 1) for x in inputs)
        out = function(*swapped, softmax_scale=scale, causal=True, **extra)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)

    return attend


def _import(module: str, name: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Refused(f"{name} cannot be imported: {error}") from None


FUNCTIONS: dict[str, Callable[[AttentionInputs, float], Built]] = {
    "torch, cudnn": partial(torch_sdpa, SDPBackend.CUDNN_ATTENTION),
    "torch, efficient": partial(torch_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "torch, flash": partial(torch_sdpa, SDPBackend.FLASH_ATTENTION),
    "TransformerEngine": transformer_engine,
    "FlashAttention-3": partial(flash_attention, "flash_attn_interface"),
    "FlashAttention-4": partial(flash_attention, "flash_attn.cute"),
}
