"""LoRA with random A and B on attentions and models."""

import torch
from torch import nn

from absorbed_mla.lora import LoRAConfig, add_lora
from absorbed_mla.lora.adapter import lora_of
from absorbed_mla.lora.model import attentions


def with_random_lora(model: nn.Module, seed: int = 0, r: int = 3, **config) -> nn.Module:
    """The model with LoRA, the same at every tensor-parallel size."""
    torch.manual_seed(seed)
    add_lora(model, LoRAConfig(r=r, lora_alpha=2 * r, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for attention in attentions(model):
            for one in (lora_of(attention) or {}).values():
                for name in ("lora_A", "lora_B"):
                    own = getattr(one, name).weight
                    axis, size = one.sharding.axis(name), one.sharding.tp_group.size()
                    shape = [n * size if i == axis else n for i, n in enumerate(own.shape)]
                    whole = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                    own.copy_(one.sharding.own_part(whole, name))
    return model
