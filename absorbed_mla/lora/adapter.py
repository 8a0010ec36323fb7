"""LoRA of one attention: which layers have it, and where it is added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.batch_invariant import parts
from absorbed_mla.caching import DerivedTables
from absorbed_mla.checkpoint.parameter_marks import keep_parameter_marks
from absorbed_mla.linear import HOLDS_NO_OUTPUT
from absorbed_mla.lora.forms import LoRAAbsorbedForm, LoRAExpandedForm, UpProjections
from absorbed_mla.lora.low_rank import COLUMN, DUPLICATED, HEADS, ROW, Begun, LowRank, Sharding
from absorbed_mla.lora.targets import FUSED_DOWN

# Of an attention: the child that holds A and B of all its layers.
NAME = "lora"


class AttentionLoRA(nn.ModuleDict):
    """A and B of an attention's layers, by the layer's name; each is a ``LowRank``.

    Layers that are applied get a forward pre-hook, which may begin the product with A, and a
    forward hook, which adds. W_UK and W_UV are multiplied by the forms of the
    attention, which are replaced by those of ``forms.py``.

    Args:
        attention: Of this package; it gets a child ``lora``.
        layers: r and scaling of each layer that has LoRA. A fused one may have one A for all of its
            rows; then it can be neither merged nor saved (``slots.py``).

    Raises:
        ValueError: If the attention has LoRA already, is sparse, or has not got a layer.
    """

    def __init__(
        self, attention: AbsorbedMLASelfAttention, layers: Mapping[str, tuple[int, float]]
    ) -> None:
        super().__init__()
        _refuse_unsupported(attention)
        self.merged: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = [attention.register_forward_pre_hook(self._check)]
        # Input of the layer that is being called, and the products with A begun for it, by name.
        self._begun: tuple[Tensor | None, dict[str, Begun]] = (None, {})
        for name, (rank, scaling) in layers.items():
            layer, inputs, outputs, sharding = _place(attention, name)
            self[name] = LowRank(rank, scaling, inputs, outputs, layer.weight, sharding)
        keep_parameter_marks(self)
        attention.add_module(NAME, self)
        for owner in {holder_of(attention, name) for name in layers} - {*_UP}:
            layer = getattr(attention, owner)
            of_all = owner, layer.weight.shape[0]
            parts = (of_all,) if owner in self else parts_of(attention, owner)
            add = partial(self._add, parts)
            setattr(add, HOLDS_NO_OUTPUT, True)
            self._handles += (
                layer.register_forward_pre_hook(partial(self._begin, parts)),
                layer.register_forward_hook(add),
            )
        self._former = _forms_of(attention)
        self._set_forms(attention, self._own_forms(attention))

    def _own_forms(self, attention: AbsorbedMLASelfAttention) -> tuple[object, object]:
        up = UpProjections(*(self._modules.get(name) for name in _UP))
        return LoRAAbsorbedForm(up), LoRAExpandedForm(attention.options.expansion_chunk_size, up)

    def _set_forms(self, attention: nn.Module, forms: tuple[object, object]) -> None:
        absorbed, expanded = forms
        core, cached = attention.core_attention, attention.cached_attention
        core._forms.update(absorbed=absorbed, expanded=expanded)
        core._choices = DerivedTables()
        cached.absorbed, cached.expanded = absorbed, expanded

    def remove(self, attention: AbsorbedMLASelfAttention) -> None:
        """Leave the attention as it was, with the weights that it has now."""
        for handle in self._handles:
            handle.remove()
        self._set_forms(attention, self._former)
        delattr(attention, NAME)

    @torch.no_grad()
    def merge(self, attention: AbsorbedMLASelfAttention) -> None:
        """Add ``scaling B A`` to the weights, and keep what they were."""
        for name in self:
            weight = getattr(attention, holder_of(attention, name)).weight
            if is_float8tensor(weight):
                raise ValueError(f"the FP8 weight of {name} cannot take LoRA's update")
        for name, one in self.items():
            owner = holder_of(attention, name)
            weight = getattr(attention, owner).weight
            self.merged.setdefault(owner, weight.detach().clone())
            rows = _rows(attention, name, weight)
            rows.copy_(rows.to(one.update().dtype) + one.update())
        self._set_forms(attention, self._former)

    @torch.no_grad()
    def unmerge(self, attention: AbsorbedMLASelfAttention) -> None:
        """Give the weights back their bits."""
        for owner, weight in self.merged.items():
            getattr(attention, owner).weight.copy_(weight)
        self.merged = {}
        self._set_forms(attention, self._own_forms(attention))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Entries of A and B of every layer.

        Raises:
            ValueError: If they are merged: whoever loads both would add the update twice.
        """
        if self.merged:
            raise ValueError("LoRA is merged into the weights: unmerge_lora before saving")
        entries: dict = {}
        for name, one in self.items():
            sharding = one.sharding
            axes = {f"{factor}.weight": sharding.axis(factor) for factor in ("lora_A", "lora_B")}
            entries |= make_sharded_tensors_for_checkpoint(
                one.state_dict(prefix="", keep_vars=True),
                f"{prefix}{name}.",
                {key: axis for key, axis in axes.items() if axis is not None},
                sharded_offsets,
                tp_group=sharding.tp_group,
                dp_cp_group=(metadata or {}).get("dp_cp_group"),
            )
        return entries

    def _check(self, attention: nn.Module, args: tuple) -> None:
        if self.merged and attention.training and torch.is_grad_enabled():
            raise ValueError("LoRA is merged into the weights: unmerge_lora before training")
        if attention.options.batch_invariant and parts.fixed.count is not None and not self.merged:
            raise ValueError(
                f"LoRA in parity mode needs {parts.OPTION}=None, got {parts.fixed.count}: ranks "
                "would sum up its products as they divide them"
            )

    def _begin(self, parts: tuple[tuple[str, int], ...], layer: nn.Module, args: tuple) -> None:
        """Without gradient, begin the products with A, which may run beside the layer's own."""
        self._begun = (None, {})
        if not self.merged and not torch.is_grad_enabled():
            self._begun = (args[0], self._products(parts, args[0]))

    def _products(self, parts: tuple[tuple[str, int], ...], x: Tensor) -> dict[str, Begun]:
        return {name: self[name].begin(x) for name, _ in parts if name in self}

    def _add(
        self, parts: tuple[tuple[str, int], ...], layer: nn.Module, args: tuple, output: tuple
    ) -> tuple | None:
        """Add to the output of a layer, of a fused one part by part."""
        if self.merged:
            return None
        (x, begun), self._begun = self._begun, (None, {})
        if x is not args[0]:  # with gradient, or another pre-hook has replaced the input
            begun = self._products(parts, args[0])
        out, *rest = output
        pieces = out.split([width for _, width in parts], -1)
        found = [
            self[name].add_to(piece, begun[name]) if name in self else piece
            for (name, _), piece in zip(parts, pieces, strict=True)
        ]
        if all(one is piece for one, piece in zip(found, pieces)):
            return None  # nothing is added, or all of it in place
        return (found[0] if len(found) == 1 else torch.cat(found, -1), *rest)


_UP = ("linear_k_up_proj", "linear_v_up_proj")


def lora_of(attention: nn.Module) -> AttentionLoRA | None:
    """LoRA of an attention; None if it has none."""
    found = attention._modules.get(NAME)
    return found if isinstance(found, AttentionLoRA) else None


def layers_of(attention: AbsorbedMLASelfAttention) -> Iterator[str]:
    """Names of the layers that an attention has, those of a fused one as separate ones."""
    if attention.dims.q_lora_rank is None:
        yield from ("linear_q_proj",)
    else:
        yield from ("linear_q_down_proj", "linear_q_up_proj")
    yield from ("linear_kv_down_proj", *_UP, "linear_proj")


def holder_of(attention: nn.Module, name: str) -> str:
    """The layer that has the weight of a layer of this name: the fused one of two."""
    return FUSED_DOWN if name not in attention._modules else name


def parts_of(attention: nn.Module, owner: str) -> tuple[tuple[str, int], ...]:
    """The layers whose rows a layer has, and how many rows of each are on this rank."""
    layer = getattr(attention, owner)
    if owner != FUSED_DOWN:
        return ((owner, layer.weight.shape[0]),)
    widths = attention.down_layers[FUSED_DOWN]
    shards = sum(widths) // layer.weight.shape[0]
    names = ("linear_q_down_proj", "linear_kv_down_proj")
    return tuple((name, width // shards) for name, width in zip(names, widths, strict=True))


def _rows(attention: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The rows of a weight that are those of a layer."""
    start = 0
    for part, rows in parts_of(attention, holder_of(attention, name)):
        if part == name:
            return weight.narrow(0, start, rows)
        start += rows
    raise AssertionError(f"{name} has rows in {holder_of(attention, name)}")


def _place(attention: AbsorbedMLASelfAttention, name: str) -> tuple[nn.Module, int, int, Sharding]:
    """A layer, the widths of its whole input and output, and how ranks share it."""
    dims = attention.dims
    heads = dims.num_heads
    widths = {
        "linear_q_proj": (dims.hidden_size, heads * dims.qk_head_dim, COLUMN),
        "linear_q_down_proj": (dims.hidden_size, dims.q_lora_rank, DUPLICATED),
        "linear_q_up_proj": (dims.q_lora_rank, heads * dims.qk_head_dim, COLUMN),
        "linear_kv_down_proj": (dims.hidden_size, dims.kv_down_dim, DUPLICATED),
        FUSED_DOWN: (dims.hidden_size, sum(attention.down_layers.get(FUSED_DOWN, ())), DUPLICATED),
        "linear_k_up_proj": (dims.kv_lora_rank, heads * dims.qk_nope_head_dim, HEADS),
        "linear_v_up_proj": (dims.kv_lora_rank, heads * dims.v_head_dim, HEADS),
        "linear_proj": (heads * dims.v_head_dim, dims.hidden_size, ROW),
    }
    inputs, outputs, kind = widths[name]
    owner = holder_of(attention, name)
    layer = getattr(attention, owner)
    own = {owner: layer.weight.shape[0], **dict(parts_of(attention, owner))}
    if kind == DUPLICATED and own[name] != outputs:
        kind = COLUMN
    if hasattr(layer, "layer_norm_weight"):
        raise ValueError(
            f"LoRA needs the norm in front of {name} in a module of its own, got "
            f"{type(layer).__name__}, which has both"
        )
    return layer, inputs, outputs, Sharding(kind, attention.tp_group, attention.sequence_parallel)


def _forms_of(attention: nn.Module) -> tuple[object, object]:
    return attention.cached_attention.absorbed, attention.cached_attention.expanded


def _refuse_unsupported(attention: AbsorbedMLASelfAttention) -> None:
    if lora_of(attention) is not None:
        raise ValueError("the model has LoRA already: remove_lora first")
    if attention.core_attention.variant is not None:
        raise ValueError(
            "LoRA supports experimental_attention_variant=None, got "
            f"{attention.core_attention.variant!r}"
        )
    if attention.config.qk_clip:
        raise ValueError("LoRA needs qk_clip=False, got True: clipping scales frozen weights")
    for parameter in attention.parameters():
        if hasattr(parameter, "main_grad"):
            raise ValueError(
                "add LoRA before DistributedDataParallel, which has the parameters already"
            )
