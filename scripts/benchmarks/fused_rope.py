"""Cases "query" and "keys" of fusions.py: our rotation beside Megatron's fused MLA RoPE.

Both rotate a query in place. Of keys Megatron's kernel makes more: it copies the up-projection's
[k_nope | v] of every head into keys and values, beside the rotated k_rope. Our products write keys
and values where they stay; k_rope is rotated once, in the latent, and copied beside k_nope, and in
backward the product with an extended W_UK sums its gradient. So "keys" are measured with their
up-projections, from latent and unrotated k_rope to keys and values and back to the gradients of
latent, k_rope and weights; what is left of either without the products is measured as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.core_attention.forms.expanded import expand, expand_backward
from absorbed_mla.rope import RotaryTable, rotate_tail
from benchmarks.kit.report import Refused
from benchmarks.together import Work

if TYPE_CHECKING:
    import argparse

    from benchmarks.kit.processes import Processes

_THEIRS = "megatron's fused RoPE"


@dataclass(frozen=True)
class Sizes:
    """Of one input, by the usual letters: tokens, heads, and widths of a head and of the latent."""

    tokens: int
    heads: int
    nope: int
    rope: int
    v: int
    latent: int

    @classmethod
    def of(cls, args: argparse.Namespace, heads: int, tokens: int) -> Sizes:
        """The dimensions of the command line."""
        rope = args.qk_pos_emb_head_dim
        return cls(tokens, heads, args.qk_head_dim, rope, args.v_head_dim, args.kv_lora_rank)


class _Lend(torch.autograd.Function):
    """Gives a buffer away as the output of an earlier layer, which may be overwritten."""

    @staticmethod
    def forward(ctx, token: Tensor, buffer: Tensor) -> Tensor:
        return buffer.data

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None


def query_works(sizes: Sizes, args: argparse.Namespace, processes: Processes) -> list[Work]:
    """Rotation of the last channels of every head of a query [S, 1, N * (nope + rope)]."""
    cos, sin = _table(sizes, args, processes)
    width = sizes.nope + sizes.rope
    shape = sizes.tokens, 1, sizes.heads * width
    values, grad = processes.random(*shape), processes.random(*shape)
    token = torch.zeros((), requires_grad=True, device=processes.device)
    moved = 2 * sizes.tokens * sizes.heads * sizes.rope * values.element_size()
    traffic = moved, moved

    def ours() -> Work:
        buffer, out_grad = values.clone(), grad.clone()
        return Work(
            "ours",
            lambda: rotate_tail(_Lend.apply(token, buffer), cos, sin, sizes.heads),
            lambda out: out.backward(out_grad),
            lambda out: (out,),
            traffic=traffic,
        )

    def theirs() -> Work:
        rotate, _ = _kernels(processes, args.block_heads)
        buffer, out_grad = (x.unflatten(-1, (sizes.heads, width)).clone() for x in (values, grad))
        tables = _their_tables(cos, sin, values.dtype)
        return Work(
            _THEIRS,
            lambda: rotate(_Lend.apply(token, buffer), *tables, sizes.nope, sizes.rope),
            lambda out: out.backward(out_grad),
            lambda out: (out.flatten(2),),
            traffic=traffic,
        )

    def copy() -> Work:
        source = processes.random(sizes.tokens, sizes.heads, sizes.rope)
        target = torch.empty_like(source)
        return Work(
            "copy",
            lambda: target.copy_(source),
            lambda _: source.copy_(target),
            traffic=traffic,
        )

    return [Work.attempt("ours", ours), Work.attempt(_THEIRS, theirs), Work.attempt("copy", copy)]


def key_works(sizes: Sizes, args: argparse.Namespace, processes: Processes) -> list[Work]:
    """From [latent | k_rope] to keys and values, and back."""
    inputs = _KeyInputs(sizes, args, processes)

    def theirs(projected: bool) -> Work:
        _, fused = _kernels(processes, args.block_heads)
        return _their_keys(inputs, fused, projected)

    return [
        Work.attempt("ours", lambda: _our_keys(inputs)),
        Work.attempt(_THEIRS, lambda: theirs(projected=True)),
        Work.attempt("ours, rope alone", lambda: _our_rope_of_keys(inputs)),
        Work.attempt(f"{_THEIRS}, rope alone", lambda: theirs(projected=False)),
    ]


class _KeyInputs:
    """Random inputs and gradients, the same for all."""

    def __init__(self, sizes: Sizes, args: argparse.Namespace, processes: Processes) -> None:
        self.sizes = sizes
        self.cos, self.sin = _table(sizes, args, processes)
        self.kv = processes.random(sizes.tokens, 1, sizes.latent + sizes.rope)
        scale = sizes.latent**-0.5
        self.w_uk = processes.random(sizes.heads, sizes.nope, sizes.latent) * scale
        self.w_uv = processes.random(sizes.heads, sizes.v, sizes.latent) * scale
        self.dk = processes.random(sizes.tokens, 1, sizes.heads, sizes.nope + sizes.rope)
        self.dv = processes.random(sizes.tokens, 1, sizes.heads, sizes.v)
        self.token = torch.zeros((), requires_grad=True, device=processes.device)

    def bytes_of(self, per_head: int, shared: int) -> int:
        """Bytes of so many channels of every head and of every token."""
        channels = self.sizes.heads * per_head + shared
        return self.sizes.tokens * channels * self.kv.element_size()


def _our_keys(inputs: _KeyInputs) -> Work:
    buffer = inputs.kv.clone()

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        kv = rotate_tail(_Lend.apply(inputs.token, buffer), inputs.cos, inputs.sin, num_heads=1)
        with torch.no_grad():
            return kv, *expand(kv, inputs.w_uk, inputs.w_uv)

    def backward(result: tuple[Tensor, Tensor, Tensor]) -> None:
        kv = result[0]
        with torch.no_grad():
            weights = inputs.w_uk, inputs.w_uv
            grads = expand_backward(kv, *weights, inputs.dk, inputs.dv)
        dkv, _, _ = (grad.to(kv.dtype) for grad in grads)
        kv.backward(dkv)

    return Work("ours", forward, backward, lambda result: result[1:])


def _our_rope_of_keys(inputs: _KeyInputs) -> Work:
    """What ours does beside its products."""
    from absorbed_mla.core_attention.forms.expanded import _broadcast_k_rope

    sizes, buffer, grad = inputs.sizes, inputs.kv.clone(), inputs.kv.clone()
    keys = torch.empty_like(inputs.dk).flatten(0, 1)

    def forward() -> Tensor:
        kv = rotate_tail(_Lend.apply(inputs.token, buffer), inputs.cos, inputs.sin, num_heads=1)
        with torch.no_grad():
            _broadcast_k_rope(kv.flatten(0, 1)[:, sizes.latent :], keys)
        return kv

    rotated = inputs.bytes_of(0, 2 * sizes.rope)
    forward_bytes = rotated + inputs.bytes_of(sizes.rope, sizes.rope)
    return Work(
        "ours, rope alone",
        forward,
        lambda kv: kv.backward(grad),
        traffic=(forward_bytes, rotated),
    )


def _their_keys(inputs: _KeyInputs, fused: Any, projected: bool) -> Work:
    sizes = inputs.sizes
    latent, k_rope = (
        part.contiguous().requires_grad_()
        for part in inputs.kv.split([sizes.latent, sizes.rope], dim=-1)
    )
    weight = torch.cat((inputs.w_uk, inputs.w_uv), dim=1).flatten(0, 1).requires_grad_()
    tables = _their_tables(inputs.cos, inputs.sin, latent.dtype)
    leaves = (latent, weight, k_rope)
    ready: Tensor | None = None
    if not projected:
        ready = F.linear(latent, weight).detach().requires_grad_()
        leaves = (ready, k_rope)

    def forward() -> tuple[Tensor, Tensor]:
        kv = F.linear(latent, weight) if ready is None else ready
        heads = kv.unflatten(-1, (sizes.heads, -1))
        widths = sizes.rope, sizes.nope, sizes.v
        return fused(heads, k_rope.unsqueeze(2), *tables, *widths)

    written = inputs.bytes_of(2 * (sizes.nope + sizes.v) + sizes.rope, sizes.rope)
    return Work(
        _THEIRS if projected else f"{_THEIRS}, rope alone",
        forward,
        lambda out: torch.autograd.grad(out, leaves, (inputs.dk, inputs.dv)),
        lambda out: out,
        traffic=None if projected else (written, written),
    )


def _table(sizes: Sizes, args: argparse.Namespace, processes: Processes) -> tuple[Tensor, Tensor]:
    from benchmarks.kit.layers import layer_config

    config = layer_config(args, processes, heads=sizes.heads, recompute=None)
    return RotaryTable(config).cos_sin(sizes.tokens, processes.device)


def _their_tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[S, 1, 1, rope] in the dtype of the hidden states, as Megatron's layer makes them."""
    halves = (torch.cat((table, table), dim=-1).to(dtype) for table in (cos, sin))
    cos, sin = (table[:, None, None].contiguous() for table in halves)
    return cos, sin


def _kernels(processes: Processes, block_heads: list[str]) -> tuple[Any, Any]:
    """Megatron's functions for the query and for keys and values.

    Args:
        processes: For the device.
        block_heads: What its tuner may choose from: it compiles and measures a kernel for each.

    Raises:
        Refused: Without a GPU.
    """
    if not processes.on_gpu:
        raise Refused("it needs a GPU")
    from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

    for kind in ("fwd_q", "bwd_q", "fwd_kv", "bwd_kv"):
        tuner = getattr(fused, f"rotary_{kind}_kernel")
        tuner.configs = [one for one in tuner.configs if str(one.kwargs["BLOCK_H"]) in block_heads]
    return fused.fused_apply_mla_rope_for_q, fused.fused_apply_mla_rope_for_kv
