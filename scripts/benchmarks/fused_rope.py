"""Cases "query" and "keys" of fusions.py: our rotation beside Megatron's fused MLA RoPE.

Both rotate a query in place. Of keys Megatron's kernel makes more: it copies the up-projection's
[k_nope | v] of every head into keys and values, beside the rotated k_rope. Our products write keys
and values where they stay; k_rope is rotated once, in the latent, and copied beside k_nope, and in
backward the product with an extended W_UK sums its gradient. So "keys" are measured with their
up-projections, from latent and unrotated k_rope to keys and values and back to the gradients of
latent, k_rope and weights; what is left of either without the products is measured as well.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.core_attention.forms.expanded import expand, expand_backward
from absorbed_mla.rope import RotaryTable, rotate_tail
from benchmarks.kit.layers import layer_config
from benchmarks.kit.report import Refused
from benchmarks.kit.works import Work, attempts

if TYPE_CHECKING:
    import argparse

    from benchmarks.kit.processes import Processes

_THEIRS = "megatron's fused RoPE"


class _Lend(torch.autograd.Function):
    """Gives a buffer away as the output of an earlier layer, which may be overwritten."""

    @staticmethod
    def forward(ctx, token: Tensor, buffer: Tensor) -> Tensor:
        return buffer.data

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None


class Inputs:
    """Sizes, rotary tables and what lends buffers, for so many heads and tokens."""

    def __init__(
        self, args: argparse.Namespace, heads: int, tokens: int, processes: Processes
    ) -> None:
        self.tokens, self.heads, self.processes = tokens, heads, processes
        self.nope, self.rope = args.qk_head_dim, args.qk_pos_emb_head_dim
        self.v, self.latent = args.v_head_dim, args.kv_lora_rank
        self.block_heads = args.block_heads
        config = layer_config(args, processes, heads=heads, recompute=None)
        self.cos, self.sin = RotaryTable(config).cos_sin(tokens, processes.device)
        self.token = torch.zeros((), requires_grad=True, device=processes.device)

    def rotated(self, buffer: Tensor, heads: int) -> Tensor:
        """Our rotation of a buffer."""
        return rotate_tail(_Lend.apply(self.token, buffer), self.cos, self.sin, heads)

    def their_tables(self) -> tuple[Tensor, Tensor]:
        """[S, 1, 1, rope] in the dtype of the hidden states, as Megatron's layer makes them."""
        dtype = self.processes.dtype
        halves = (torch.cat((table, table), dim=-1).to(dtype) for table in (self.cos, self.sin))
        cos, sin = (table[:, None, None].contiguous() for table in halves)
        return cos, sin

    def kernels(self) -> tuple[Any, Any]:
        """Megatron's functions for the query and for keys and values.

        Its tuner compiles and measures a kernel for each of the heads that it may choose from.

        Raises:
            Refused: Without a GPU.
        """
        if not self.processes.on_gpu:
            raise Refused("it needs a GPU")
        from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

        for kind in ("fwd_q", "bwd_q", "fwd_kv", "bwd_kv"):
            tuner = getattr(fused, f"rotary_{kind}_kernel")
            tuner.configs = [
                c for c in tuner.configs if str(c.kwargs["BLOCK_H"]) in self.block_heads
            ]
        return fused.fused_apply_mla_rope_for_q, fused.fused_apply_mla_rope_for_kv

    def bytes_of(self, per_head: int, shared: int) -> int:
        """Bytes of so many channels of every head and of every token."""
        return self.tokens * (self.heads * per_head + shared) * self.processes.dtype.itemsize


def query_works(inputs: Inputs) -> list[Work]:
    """Rotation of the last channels of every head of a query [S, 1, N * (nope + rope)]."""
    heads, width, random = inputs.heads, inputs.nope + inputs.rope, inputs.processes.random
    values, grad = (random(inputs.tokens, 1, heads * width) for _ in range(2))
    traffic = (inputs.bytes_of(2 * inputs.rope, 0),) * 2

    def ours() -> Work:
        buffer, out_grad = values.clone(), grad.clone()
        return Work(
            lambda: inputs.rotated(buffer, heads),
            lambda out: out.backward(out_grad),
            lambda out: (out,),
            traffic=traffic,
        )

    def theirs() -> Work:
        rotate, _ = inputs.kernels()
        buffer, out_grad = (x.unflatten(-1, (heads, width)).clone() for x in (values, grad))
        tables = inputs.their_tables()
        return Work(
            lambda: rotate(_Lend.apply(inputs.token, buffer), *tables, inputs.nope, inputs.rope),
            lambda out: out.backward(out_grad),
            lambda out: (out.flatten(2),),
            traffic=traffic,
        )

    def copy() -> Work:
        source = random(inputs.tokens, heads, inputs.rope)
        target = torch.empty_like(source)
        return Work(lambda: target.copy_(source), lambda _: source.copy_(target), traffic=traffic)

    return attempts({"ours": ours, _THEIRS: theirs, "copy": copy})


def key_works(inputs: Inputs) -> list[Work]:
    """From [latent | k_rope] to keys and values, and back."""
    random, scale = inputs.processes.random, inputs.latent**-0.5
    kv = random(inputs.tokens, 1, inputs.latent + inputs.rope)
    weights = [random(inputs.heads, w, inputs.latent) * scale for w in (inputs.nope, inputs.v)]
    dk = random(inputs.tokens, 1, inputs.heads, inputs.nope + inputs.rope)
    dv = random(inputs.tokens, 1, inputs.heads, inputs.v)
    return attempts(
        {
            "ours": lambda: _our_keys(inputs, kv, weights, dk, dv),
            _THEIRS: lambda: _their_keys(inputs, kv, weights, dk, dv),
            "ours, rope alone": lambda: _our_rope_of_keys(inputs, kv, dk),
            f"{_THEIRS}, rope alone": lambda: _their_keys(
                inputs, kv, weights, dk, dv, projected=False
            ),
        }
    )


def _our_keys(inputs: Inputs, kv: Tensor, weights: list[Tensor], dk: Tensor, dv: Tensor) -> Work:
    buffer = kv.clone()

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        rotated = inputs.rotated(buffer, 1)
        with torch.no_grad():
            return rotated, *expand(rotated, *weights)

    def backward(result: tuple[Tensor, Tensor, Tensor]) -> None:
        rotated = result[0]
        with torch.no_grad():
            grads = expand_backward(rotated, *weights, dk, dv)
        dkv, _, _ = (grad.to(rotated.dtype) for grad in grads)
        rotated.backward(dkv)

    return Work(forward, backward, lambda result: result[1:])


def _our_rope_of_keys(inputs: Inputs, kv: Tensor, dk: Tensor) -> Work:
    """What ours does beside its products."""
    from absorbed_mla.core_attention.forms.expanded import _broadcast_k_rope

    buffer, grad = kv.clone(), kv.clone()
    keys = torch.empty_like(dk).flatten(0, 1)

    def forward() -> Tensor:
        rotated = inputs.rotated(buffer, 1)
        with torch.no_grad():
            _broadcast_k_rope(rotated.flatten(0, 1)[:, inputs.latent :], keys)
        return rotated

    moved = inputs.bytes_of(0, 2 * inputs.rope)
    traffic = moved + inputs.bytes_of(inputs.rope, inputs.rope), moved
    return Work(forward, lambda rotated: rotated.backward(grad), traffic=traffic)


def _their_keys(
    inputs: Inputs,
    kv: Tensor,
    weights: list[Tensor],
    dk: Tensor,
    dv: Tensor,
    *,
    projected: bool = True,
) -> Work:
    _, fused = inputs.kernels()
    latent, k_rope = (
        part.contiguous().requires_grad_()
        for part in kv.split([inputs.latent, inputs.rope], dim=-1)
    )
    weight = torch.cat(weights, dim=1).flatten(0, 1).requires_grad_()
    tables, leaves = inputs.their_tables(), (latent, weight, k_rope)
    widths = inputs.rope, inputs.nope, inputs.v
    project = partial(F.linear, latent, weight)
    if not projected:
        ready = project().detach().requires_grad_()
        leaves, project = (ready, k_rope), lambda: ready

    def forward() -> tuple[Tensor, Tensor]:
        heads = project().unflatten(-1, (inputs.heads, -1))
        return fused(heads, k_rope.unsqueeze(2), *tables, *widths)

    written = inputs.bytes_of(2 * (inputs.nope + inputs.v) + inputs.rope, inputs.rope)
    return Work(
        forward,
        lambda out: torch.autograd.grad(out, leaves, (dk, dv)),
        lambda out: out,
        traffic=None if projected else (written, written),
    )
