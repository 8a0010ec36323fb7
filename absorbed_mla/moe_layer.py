"""Megatron's MoE layer with a norm of its output, and specs with what options say of experts."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from absorbed_mla.deepseek_router import DeepSeekRouter
from absorbed_mla.norm import RMSNorm
from absorbed_mla.options import AbsorbedMLAOptions


class NormedMoE(MoELayer):
    """Megatron's mixture of experts whose output may pass a norm (A.X-K1, arXiv:2601.09200).

    Args:
        config: Of the model; ``layernorm_epsilon`` is the norm's.
        post_mlp_layernorm: Whether the sum of routed and shared experts is normed before it is
            added to the residual stream.
        host: The other arguments of Megatron's layer.
    """

    def __init__(self, config: Any, *, post_mlp_layernorm: bool = False, **host: Any) -> None:
        super().__init__(config, **host)
        self.post_mlp_layernorm = None
        if post_mlp_layernorm:
            epsilon = config.layernorm_epsilon
            self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, epsilon)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """The layer's output [S, B, H]; Megatron recomputes and overlaps it with the experts."""
        return self.normed(super().postprocess(output, shared_expert_output))

    def normed(self, output: Tensor) -> Tensor:
        """``output`` [S, B, H] through the norm, if there is one."""
        return output if self.post_mlp_layernorm is None else self.post_mlp_layernorm(output)


def with_moe_options(mlp: Any, options: AbsorbedMLAOptions) -> Any:
    """What builds a layer's MLP, as options ask for if it is a mixture of experts.

    Args:
        mlp: Of a layer's submodules, dense or Megatron's ``MoELayer``.
        options: Those of the router, and ``post_mlp_layernorm``, are read.
    """
    keywords = getattr(mlp, "keywords", {})
    submodules = keywords.get("submodules")
    if not isinstance(submodules, MoESubmodules):
        return mlp
    made = mlp.func
    if options.chooses_experts:
        router = functools.partial(DeepSeekRouter, options=options)
        keywords = {**keywords, "submodules": replace(submodules, router=router)}
    if options.post_mlp_layernorm:
        assert made is MoELayer
        made, keywords = NormedMoE, {**keywords, "post_mlp_layernorm": True}
    return functools.partial(made, *mlp.args, **keywords)


def use_moe_options(
    block: TransformerBlockSubmodules, options: AbsorbedMLAOptions
) -> TransformerBlockSubmodules:
    """A block spec of any layers, such as Megatron's own, with :func:`with_moe_options` in them.

    Args:
        block: With Megatron's MLPs.
        options: As of :func:`with_moe_options`.
    """
    layers: list[ModuleSpec] = []
    for layer in block.layer_specs:
        mlp = with_moe_options(layer.submodules.mlp, options)
        layers.append(replace(layer, submodules=replace(layer.submodules, mlp=mlp)))
    return replace(block, layer_specs=layers)
