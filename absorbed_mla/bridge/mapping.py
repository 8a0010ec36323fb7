"""Megatron-Bridge's mappings of the weights that it does not know.

Bridge knows ``linear_kv_up_proj``; our attention has the rows of K and of V apart. It does not know
the ``linear_qkv_down_proj`` of ``mla_down_proj_fusion``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    MegatronParamMapping,
)
from megatron.bridge.models.deepseek import DeepSeekV2Bridge, DeepSeekV3Bridge
from megatron.bridge.models.glm.glm47_flash_bridge import GLM47FlashBridge
from megatron.bridge.models.kimi.kimi_bridge import KimiK2Bridge
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from absorbed_mla.checkpoint.names import KV_DOWN, KV_UP, Q_DOWN, QKV_DOWN

# Classes of ours that hold the whole weight on every tensor-parallel rank.
for _name in ("DuplicatedLinear", "TEDuplicatedLinear", "PackedRouter", "DeepSeekRouter"):
    AutoMapping.register_module_type(_name, "replicated")


@dataclass(frozen=True)
class _Heads:
    """The rows of ``kv_b_proj``: for each head those of K, then those of V.

    Attributes:
        count: Number of heads of the whole model.
        widths: Rows of a head, by the name of our projection.
        waiting: Whole projections whose other half has not been exported yet, by ``kv_b_proj``.
    """

    count: int
    widths: dict[str, int]
    waiting: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def half(self, kv_b: Tensor, name: str) -> Tensor:
        """The rows of one of our projections."""
        by_head = kv_b.view(self.count, sum(self.widths.values()), *kv_b.shape[1:])
        parts = dict(zip(self.widths, by_head.split([*self.widths.values()], dim=1)))
        return parts[name].reshape(-1, *kv_b.shape[1:]).contiguous()

    def whole(self, halves: dict[str, Tensor]) -> Tensor:
        """``kv_b_proj`` of both projections."""
        parts = [halves[name].unflatten(0, (self.count, n)) for name, n in self.widths.items()]
        return torch.cat(parts, dim=1).flatten(0, 1)


class HalfOfKVUp(MegatronParamMapping[Tensor]):
    """``linear_k_up_proj`` or ``linear_v_up_proj``, whose rows ``kv_b_proj`` has head by head.

    On export the second of the two makes ``kv_b_proj``; Bridge exports them one after the other.

    Args:
        megatron_param: Pattern of our name.
        hf_param: Pattern of the name of ``kv_b_proj``.
        name: Of our projection.
        heads: What all mappings of a model share.
    """

    def __init__(self, megatron_param: str, hf_param: str, name: str, heads: _Heads) -> None:
        super().__init__(megatron_param, hf_param)
        self._column = ColumnParallelMapping(megatron_param, hf_param)
        self._name, self._heads = name, heads

    def resolve(self, captures: tuple[str, ...]) -> HalfOfKVUp:
        """The mapping of one layer."""
        return type(self)(*self._resolve_names(captures), self._name, self._heads)

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """This rank's rows."""
        half = self._heads.half(hf_weights, self._name)
        return self._column.hf_to_megatron(half, megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """``kv_b_proj``, or nothing until the other half comes."""
        own = self._column.megatron_to_hf(megatron_weights, megatron_module)
        for hf_name, half in own.items():
            halves = self._heads.waiting.setdefault(hf_name, {})
            halves[self._name] = half
            if len(halves) == len(self._heads.widths):
                return {hf_name: self._heads.whole(self._heads.waiting.pop(hf_name))}
        return {}


class BothDown(MegatronParamMapping[dict[str, Tensor]]):
    """``linear_qkv_down_proj``, the rows of ``q_a_proj`` and then those of ``kv_a_proj_with_mqa``.

    Each tensor-parallel rank of a column-parallel layer has its rows of both.

    Args:
        megatron_param: Pattern of our name.
        hf_param: Patterns of the two, ``"q"`` and ``"kv"``.
        widths: Rows of the two.
    """

    def __init__(
        self, megatron_param: str, hf_param: dict[str, str], widths: tuple[int, int]
    ) -> None:
        super().__init__(megatron_param, hf_param)
        self._whole = AutoMapping(megatron_param, hf_param["q"])
        self._widths = widths

    def resolve(self, captures: tuple[str, ...]) -> BothDown:
        """The mapping of one layer."""
        return type(self)(*self._resolve_names(captures), self._widths)

    def hf_to_megatron(self, hf_weights: dict[str, Tensor], megatron_module: nn.Module) -> Tensor:
        """This rank's rows."""
        shards = self._shards(megatron_module)
        parts = [hf_weights[name].chunk(shards) for name in ("q", "kv")]
        by_rank = torch.cat([part for of_rank in zip(*parts) for part in of_rank])
        return self._whole.hf_to_megatron(by_rank, megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """Both weights."""
        own = None if megatron_module is None else self._shards(megatron_module)
        shards = self.broadcast_obj_from_pp_rank(own, f"{self.megatron_param} shards")
        found = self._whole.megatron_to_hf(megatron_weights, megatron_module)
        widths = [width // shards for width in self._widths]
        for by_rank in found.values():
            parts = by_rank.unflatten(0, (shards, -1)).split(widths, dim=1)
            names = self.hf_param["q"], self.hf_param["kv"]
            return {name: part.flatten(0, 1).contiguous() for name, part in zip(names, parts)}
        return {}

    def _shards(self, module: nn.Module) -> int:
        return sum(self._widths) // module.weight.shape[0]


def _both_down(mappings: Iterable[MegatronParamMapping], config: object) -> Iterator[BothDown]:
    """Mappings of fused down-projections beside a bridge's own of separate ones."""
    by_name = {mapping.megatron_param: mapping.hf_param for mapping in mappings}
    for pattern, q in by_name.items():
        kv = by_name.get(pattern.replace(Q_DOWN, KV_DOWN))
        if pattern.endswith(Q_DOWN) and kv is not None and config.q_lora_rank is not None:
            widths = config.q_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim
            yield BothDown(pattern.replace(Q_DOWN, QKV_DOWN), {"q": q, "kv": kv}, widths)


def _halves(mappings: Iterable[MegatronParamMapping], config: object) -> Iterator[HalfOfKVUp]:
    """Our mappings beside a bridge's own of standard MLA's up-projection."""
    widths = {"linear_k_up_proj": config.qk_nope_head_dim, "linear_v_up_proj": config.v_head_dim}
    heads = _Heads(config.num_attention_heads, widths)
    for mapping in mappings:
        pattern = mapping.megatron_param
        if pattern.endswith(KV_UP):
            for name in widths:
                ours = pattern.replace("linear_kv_up_proj", name)
                yield HalfOfKVUp(ours, mapping.hf_param, name, heads)


def register(bridge: type[MegatronModelBridge], like: type[MegatronModelBridge]) -> None:
    """Let Bridge take a class for the models of another."""
    decorator = MegatronModelBridge.register_bridge(
        source=like.SOURCE_NAME,
        target=GPTModel,
        provider=like.PROVIDER_CLASS,
        model_type=like.MODEL_TYPE,
    )
    decorator(bridge)


def _extended(bridge: type[MegatronModelBridge]) -> type[MegatronModelBridge]:
    """A bridge that also knows our projections, registered in place of ``bridge``."""

    class Extended(bridge):  # type: ignore[misc, valid-type]
        """The same bridge with more mappings for each of standard MLA's projections."""

        def mapping_registry(self) -> MegatronMappingRegistry:
            """See the base class."""
            mappings = super().mapping_registry().get_all_mappings()
            halves = _halves(mappings, self.hf_config)
            return MegatronMappingRegistry(
                *mappings, *halves, *_both_down(mappings, self.hf_config)
            )

    Extended.__name__ = f"AbsorbedMLA{bridge.__name__}"
    register(Extended, bridge)
    return Extended


BRIDGES = tuple(
    map(_extended, (DeepSeekV2Bridge, DeepSeekV3Bridge, KimiK2Bridge, GLM47FlashBridge))
)
