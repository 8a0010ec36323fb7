"""Cases "down" and "layer" of fusions.py: both down-projections as one product or as two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from absorbed_mla import AbsorbedMLAOptions
from benchmarks.kit import layers
from benchmarks.kit.works import Work, attempts

if TYPE_CHECKING:
    import argparse

    from benchmarks.kit.processes import Processes

# Applied to hidden states, with its weight.
_Projection = tuple[Callable[[Tensor], Tensor], Tensor]


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
        leaves = (weight.clone().requires_grad_() for weight in weights)
        return [(partial(F.linear, weight=leaf), leaf) for leaf in leaves]

    def modules(weights: Sequence[Tensor]) -> list[_Projection]:
        kind = layers.attention_spec(config, AbsorbedMLAOptions()).submodules.linear_kv_down_proj
        built = [_layer(kind, weight, config).to(processes.device) for weight in weights]
        return [(lambda x, layer=one: layer(x)[0], one.weight) for one in built]

    def work(make: Callable, weights: Sequence[Tensor]) -> Work:
        projections = make(weights)

        def forward() -> Sequence[Tensor]:
            outs = [apply(x) for apply, _ in projections]
            return outs if len(outs) > 1 else outs[0].split(widths, dim=-1)

        def forget_gradients() -> None:
            for leaf in (x, *(weight for _, weight in projections)):
                leaf.grad = None

        def backward(outs: Sequence[Tensor]) -> None:
            torch.autograd.backward(outs, grads)

        return Work(forward, backward, lambda outs: outs, forget_gradients)

    return attempts(
        {
            name.format(kind): partial(work, make, weights)
            for kind, make in (("tensors", tensors), ("layers", modules))
            for name, weights in (("two {}", whole.split(widths)), ("one of {}", [whole]))
        }
    )


def layer_works(
    heads: int, tokens: int, args: argparse.Namespace, processes: Processes
) -> list[Work]:
    """Our whole attention layer, with the same weights and the same input."""
    x, grad = (processes.random(tokens, 1, args.hidden_size) for _ in range(2))
    state: dict[str, Tensor] = {}

    def work(fused: bool) -> Work:
        config = layers.layer_config(args, processes, heads=heads, recompute=None)
        config.mla_down_proj_fusion = fused
        layer = layers.build(config, AbsorbedMLAOptions(), processes, tokens, None).layer
        if state:
            layer.load_state_dict(state)
        else:
            state.update(layer.state_dict())
        return layers.Subject(layer, x.clone().requires_grad_(), grad, None).work()

    return attempts({"separate": partial(work, False), "fused": partial(work, True)})


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
