"""Training attention of PyTorch, TransformerEngine and FlashAttention.

Each function takes the inputs and the softmax scale. It returns the attention, a function without
arguments that saves what its backward needs, and the tensors to take gradients of. Queries, keys
and values lie in memory as in Megatron, [S, B, N, D].
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.kit.report import Refused
from benchmarks.peers import first_module, libraries

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.core_attention.types import AttentionInputs

Attend = Callable[[], "Tensor"]
Built = tuple[Attend, "tuple[Tensor, ...]"]

# What PyTorch raises where its backend refuses.
_NO_KERNEL = ("No available kernel", "No viable backend")
# In its warnings: headings, and that the other backends are switched off.
_NO_REASON = ("not used because", "runtime disabled")
# What TransformerEngine raises where all its attentions refuse.
_TE_HAS_NONE = "No dot product attention backend"
_TE_VARIABLES = {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}


def torch_sdpa(backend: str, inputs: AttentionInputs, scale: float) -> Built:
    """PyTorch's scaled_dot_product_attention with one of its backends, [B, N, S, D] views."""
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = _joined(inputs)

    def attend() -> Tensor:
        heads, key, value = (
            x.expand(-1, -1, q.shape[2], -1).permute(1, 2, 0, 3) for x in (q, k, _value(k, v))
        )
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            out = functional.scaled_dot_product_attention(
                heads, key, value, is_causal=True, scale=scale
            )
        return out.permute(2, 0, 1, 3)

    _refuse_as_torch_does(attend)
    return attend, _leaves(q, k, v)


def transformer_engine(inputs: AttentionInputs, scale: float) -> Built:
    """TransformerEngine's fused attention (cuDNN's), by its DotProductAttention."""
    module = first_module("transformer_engine.pytorch")
    q, k, v = _joined(inputs)
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


def flash_attention_4(inputs: AttentionInputs, scale: float) -> Built:
    """FlashAttention-4, [B, S, N, D]; the latent as its value, with ``qv``."""
    function = first_module("flash_attn.cute").flash_attn_func
    extra: dict[str, Tensor] = {}
    if inputs.value is not None:
        leaves = q, k, v = _joined(inputs)
    else:
        q, qv = (x.detach().clone().requires_grad_() for x in (inputs.q_rope, inputs.q_content))
        k = inputs.k_rope.unsqueeze(2).detach().clone().requires_grad_()
        v = inputs.k_content.detach().clone().requires_grad_()
        extra, leaves = {"qv": qv}, (q, qv, k, v)

    def attend() -> Tensor:
        more = {name: x.transpose(0, 1) for name, x in extra.items()}
        swapped = (x.transpose(0, 1) for x in (q, k, v))
        out = function(*swapped, softmax_scale=scale, causal=True, **more)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)

    return attend, leaves


def flash_attention_3(inputs: AttentionInputs, scale: float) -> Built:
    """FlashAttention-3 of vLLM, which has a forward only."""
    import torch

    libraries.require_flash_attention_3()
    qv = None
    if inputs.value is None:
        q, k, v = inputs.q_rope, inputs.k_rope.unsqueeze(2), inputs.k_content
        qv = inputs.q_content[:, 0]
    else:
        q, k, v = inputs.as_multi_head()
    bounds = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    more = {"cu_seqlens": bounds, "cu_seqlens_k": bounds, "max_seqlen": len(q), "num_splits": 1}
    parts = q[:, 0], k[:, 0], v[:, 0], qv
    return (lambda: libraries.flash_attention_3(*parts, scale, **more)[:, None]), ()


@contextlib.contextmanager
def only_fused() -> Iterator[None]:
    """Let TransformerEngine take no attention but cuDNN's."""
    former = {name: os.environ.get(name) for name in _TE_VARIABLES}
    os.environ.update(_TE_VARIABLES)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _joined(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Query [S, B, N, K], key [S, B, N or 1, K] and value [S, B, N or 1, V], leaves of autograd.

    The latent's value is a view of its key.
    """
    import torch

    if inputs.value is not None:
        q, k, v = (x.detach().requires_grad_() for x in inputs.as_multi_head())
        return q, k, v
    q_content, q_rope, latent, k_rope, _ = inputs
    q = torch.cat((q_content, q_rope), dim=-1).requires_grad_()
    k = torch.cat((latent, k_rope.unsqueeze(2)), dim=-1).requires_grad_()
    return q, k, k[..., : latent.shape[-1]]


def _value(k: Tensor, v: Tensor) -> Tensor:
    """``v``, anew where it is a view of the key: backward of the last call freed its graph."""
    return v if v.is_leaf else k[..., : v.shape[-1]]


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x.is_leaf)


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
            own = [text for text in reasons if not any(words in text for words in _NO_REASON)]
            raise Refused("; ".join(own) or "this device has no such kernel") from None


PEERS: dict[str, Callable[[Any, float], Built]] = {
    "torch, cudnn": partial(torch_sdpa, "CUDNN_ATTENTION"),
    "torch, efficient": partial(torch_sdpa, "EFFICIENT_ATTENTION"),
    "torch, flash": partial(torch_sdpa, "FLASH_ATTENTION"),
    "TransformerEngine": transformer_engine,
    "FlashAttention-3": flash_attention_3,
    "FlashAttention-4": flash_attention_4,
}
