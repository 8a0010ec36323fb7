"""Cases "down" and "layer" of fusions.py: both down-projections as one product or as two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from absorbed_mla import AbsorbedMLAOptions
from benchmarks.kit import layers
from benchmarks.together import Work

if TYPE_CHECKING:
    import argparse

    from benchmarks.kit.processes import Processes


def down_works(tokens: int, args: argparse.Namespace, processes: Processes) -> list[Work]:
    """Hidden states [S, 1, hidden] to the compressed query and to [latent | k_rope], and back.

    As products of tensors, and as layers of the backend's own class.
    """
    widths = [args.q_lora_rank, args.kv_lora_rank + args.qk_pos_emb_head_dim]
    x = processes.random(tokens, 1, args.hidden_size).requires_grad_()
    whole = processes.random(sum(widths), args.hidden_size) * args.hidden_size**-0.5
    grads = [processes.random(tokens, 1, width) for width in widths]
    config = layers.layer_config(args, processes, heads=1, recompute=None)

    def tensors(weights: Sequence[Tensor]) -> list[_Projection]:
        return [_Projection(partial(F.linear, weight=w), w) for w in map(_leaf, weights)]

    def modules(weights: Sequence[Tensor]) -> list[_Projection]:
        kind = layers.attention_spec(config, AbsorbedMLAOptions()).submodules.linear_kv_down_proj
        built = [_layer(kind, weight, config).to(processes.device) for weight in weights]
        return [_Projection(lambda x, layer=one: layer(x)[0], one.weight) for one in built]

    def work(name: str, make: Callable, weights: Sequence[Tensor]) -> Work:
        projections = make(weights)

        def forward() -> Sequence[Tensor]:
            outs = [one.apply(x) for one in projections]
            return outs if len(outs) > 1 else outs[0].split(widths, dim=-1)

        def forget_gradients() -> None:
            for leaf in (x, *(one.weight for one in projections)):
                leaf.grad = None

        return Work(
            name,
            forward,
            lambda outs: torch.autograd.backward(outs, grads),
            lambda outs: outs,
            forget_gradients,
        )

    return [
        Work.attempt(name, lambda name=name, make=make, weights=weights: work(name, make, weights))
        for kind, make in (("tensors", tensors), ("layers", modules))
        for name, weights in (
            (f"two {kind}", whole.split(widths)),
            (f"one of {kind}", [whole]),
        )
    ]


def layer_works(
    heads: int, tokens: int, args: argparse.Namespace, processes: Processes
) -> list[Work]:
    """Our whole attention layer, with the same weights and the same input."""
    x = processes.random(tokens, 1, args.hidden_size)
    grad = processes.random(tokens, 1, args.hidden_size)
    state: dict[str, Tensor] = {}

    def work(name: str, fused: bool) -> Work:
        config = layers.layer_config(args, processes, heads=heads, recompute=None)
        config.mla_down_proj_fusion = fused
        built = layers.build(config, AbsorbedMLAOptions(), processes, tokens, None)
        if state:
            built.layer.load_state_dict(state)
        else:
            state.update(built.layer.state_dict())
        subject = layers.Subject(built.layer, x.clone().requires_grad_(), grad, None)
        return Work(
            name,
            subject.forward,
            subject.backward,
            lambda out: (out,),
            subject.forget_gradients,
        )

    return [
        Work.attempt(name, lambda name=name, fused=fused: work(name, fused))
        for name, fused in (("separate", False), ("fused", True))
    ]


@dataclass(frozen=True)
class _Projection:
    """Of hidden states, with its weight."""

    apply: Callable[[Tensor], Tensor]
    weight: Tensor


def _leaf(weight: Tensor) -> Tensor:
    return weight.clone().requires_grad_()


def _layer(kind: type, weight: Tensor, config) -> nn.Module:
    """A down-projection of a class of the specs."""
    layer = build_module(
        kind,
        weight.shape[1],
        weight.shape[0],
        config=config,
        init_method=config.init_method,
        bias=False,
        skip_bias_add=False,
        is_expert=False,
        gather_output=False,
        tp_comm_buffer_name="down_proj",
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer
