"""Several adapters in one model that generates, one or none for each token of a step.

The A of ``max_loras`` adapters are the rows of one matrix, their B the columns of another. A step
multiplies by both; in between, a token keeps the numbers of its own adapter and loses the others.
So no product depends on which adapters run, the latent is never expanded, and a token's output is
that of its adapter alone. In steps of few tokens the products with A have a stream of their own,
beside those of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.batch_invariant import is_enabled
from absorbed_mla.batch_invariant.parts import wide
from absorbed_mla.kernels.invariant.tiles import PART
from absorbed_mla.lora.adapter import AttentionLoRA, holder_of, layers_of, parts_of
from absorbed_mla.lora.low_rank import HEADS, Begun, LowRank
from absorbed_mla.lora.model import attentions
from absorbed_mla.lora.peft_format import Update, Updates, read_peft_adapter
from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.lora.side_stream import SideStream
from absorbed_mla.serving.export.agreement import on_all_ranks

_ATTRIBUTE = "lora_slots"
# Most tokens of a layer's input for which products with A run on the side stream.
_FEW_TOKENS = 512


class LoRASlots:
    """Room for adapters on every linear layer of the attentions of a model.

    Args:
        model: This rank's part of it, whose attentions run in the absorbed form.
        max_loras: Adapters that may run at the same time.
        max_lora_rank: Of each.
        graph_tokens: Most tokens of a step, if CUDA graphs hold any, which read adapters where they
            are: every step multiplies by all of them. None: steps without adapters do not.

    Raises:
        ValueError: If the attention is sparse, the model has LoRA already, or parity mode would sum
            up in parts.
    """

    def __init__(
        self, model: GPTModel, max_loras: int, max_lora_rank: int, graph_tokens: int | None = None
    ) -> None:
        self.max_loras, self.max_lora_rank = max_loras, max_lora_rank
        # Instructions sum up 16 at a time: a slot's place changes no bit of a sum.
        self._slot_ranks = -(-max_lora_rank // 16) * 16
        self._ranks = max_loras * self._slot_ranks
        self._attentions = list(attentions(model))
        for attention in self._attentions:
            parity = attention.options.batch_invariant
            if parity and self._ranks > PART:
                raise ValueError(
                    "max_loras * max_lora_rank, the rank rounded up to a multiple of 16, must be "
                    f"at most {PART} in parity mode, got {self._ranks}"
                )
            # Layers in one product have one A below the other's, and one product with both.
            owners = [holder_of(attention, name) for name in layers_of(attention)]
            layers = {one: (len(parts_of(attention, one)) * self._ranks, 1.0) for one in owners}
            lora = AttentionLoRA(attention, layers)
            for one in lora.values():
                if parity and one.sharding.kind != HEADS:
                    # As in training, the product with A is rounded before it is scaled.
                    weight = one.lora_A.weight
                    one.scalings = weight.new_ones(one.rank, dtype=wide(weight.dtype))
                one.begin_product = partial(self._begin_product, one)
                one.requires_grad_(False)
                one.lora_A.weight.zero_()
        # By slot, the digest of its adapter; the one used longest ago is first in the order.
        self._digests: list[str | None] = [None] * max_loras
        self._order = list(range(max_loras))
        parameter = next(model.parameters())
        # Of every row of A, and of the last step's tokens.
        self._slot_of_rank = torch.arange(max_loras).repeat_interleave(self._slot_ranks)
        self._slot_of_rank = self._slot_of_rank.to(parameter.device)
        self._slots: Tensor | None = None
        # [tokens, ranks of all slots]: whose numbers a token keeps. In graphs, at one address.
        self._mask: Tensor | None = None
        self._static: Tensor | None = None
        if graph_tokens is not None:
            shape = graph_tokens, self._ranks
            self._static = torch.zeros(shape, dtype=torch.bool, device=parameter.device)
        self._side = SideStream(parameter.device)
        setattr(model, _ATTRIBUTE, self)

    @classmethod
    def of(cls, model: GPTModel) -> LoRASlots | None:
        """Those of a model; None if it has none."""
        return getattr(model, _ATTRIBUTE, None)

    def hold(self, request: LoRARequest, in_use: Collection[int]) -> tuple[int, str]:
        """Have an adapter in a slot; collective over all ranks of the model.

        Args:
            request: Names its folder.
            in_use: Slots of requests that have not ended.

        Returns:
            The slot, and the digest of the adapter's files; None if all slots are in use.

        Raises:
            ValueError: On every rank, if the adapter cannot be read or does not fit the model or
                ``max_lora_rank``.
        """
        (digest, updates), _ = on_all_ranks(lambda: (self._read(request), None))
        if digest in self._digests:
            slot = self._digests.index(digest)
        else:
            free = [slot for slot in self._order if slot not in in_use]
            if not free:
                return None
            slot = free[0]
            self._write(slot, updates)
            self._digests[slot] = digest
        self._order.remove(slot)
        self._order.append(slot)
        return slot, digest

    def begin_step(self, context: DynamicInferenceContext, slots: Mapping[int, int]) -> None:
        """Know the adapter of every token of a forward pass.

        Args:
            context: Of the pass.
            slots: By number of the request, for those that have one.
        """
        found = self._of_tokens(context, slots)
        if self._static is None:
            self._mask = self._mask_of(found) if bool((found >= 0).any()) else None
        elif self._slots is None or not torch.equal(found, self._slots):
            assert len(found) <= len(self._static), "graph_tokens are those of the largest step"
            self._mask_of(found, out=self._static[: len(found)])
        self._slots = found

    def _of_tokens(self, context: DynamicInferenceContext, slots: Mapping[int, int]) -> Tensor:
        """The slot of every token of a step, on the CPU; -1: none, or padding."""
        active = context.active_token_count
        found = torch.full((context.padded_active_token_count,), -1)
        if slots:
            rows = [slots.get(number, -1) for number in context.request_ids.tolist()]
            found[:active] = torch.tensor(rows)[context.token_to_request_idx[:active].cpu().long()]
        return found

    def _mask_of(self, slots: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.eq(
            slots.to(self._slot_of_rank.device, non_blocking=True)[:, None],
            self._slot_of_rank,
            out=out,
        )

    def _begin_product(self, one: LowRank, product: Callable[[], Tensor], tokens: int) -> Begun:
        """``A x`` [tokens, ..., ranks of all slots], where a token keeps those of its own."""
        parts = one.sharding.tp_group.size() if one.divides_tokens else 1
        # Megatron captures layers before there is any step.
        mask = self._mask if self._static is None else self._static[: parts * tokens]
        if mask is None:
            return lambda: None
        if parts > 1:
            mask = mask.chunk(parts)[one.sharding.tp_group.rank()]
        work = partial(_masked, mask, product)
        # Larger steps wait for no kernel, and their products are large themselves.
        alone = tokens > _FEW_TOKENS or torch.is_grad_enabled() or is_enabled(mask.device)
        return work if alone else self._side.start(work)

    def _read(self, request: LoRARequest) -> tuple[str, Updates]:
        try:
            digest = request.digest()
            if digest in self._digests or not self._attentions:
                return digest, {}
            updates = read_peft_adapter(request.lora_path, self._attentions[0])
        except OSError as error:
            raise ValueError(f"lora_path cannot be read: {error}") from error
        rank = max(len(update.a) for update in updates.values())
        if rank > self.max_lora_rank:
            raise ValueError(
                f"max_lora_rank must be at least {rank}, that of {request.lora_name}, got "
                f"{self.max_lora_rank}"
            )
        return digest, updates

    def _write(self, slot: int, updates: Updates) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for attention in self._attentions:
                for owner, one in attention.lora.items():
                    row = 0
                    for i, (name, rows) in enumerate(parts_of(attention, owner)):
                        first = i * self._ranks + slot * self._slot_ranks
                        place = slice(first, first + self._slot_ranks), slice(row, row + rows)
                        update = updates.get((attention.layer_number - 1, name))
                        self._write_layer(one, *place, update)
                        row += rows

    def _write_layer(self, one: LowRank, ranks: slice, rows: slice, update: Update | None) -> None:
        a, b = one.lora_A.weight[ranks].zero_(), one.lora_B.weight[rows, ranks].zero_()
        if update is None:
            return
        count, own = len(update.a), one.sharding.own_part(update.b, "lora_B").to(b.dtype)
        a[:count] = one.sharding.own_part(update.a, "lora_A")
        if one.scalings is not None:
            one.scalings[ranks] = update.scaling
        else:
            own = own.to(wide(b.dtype)) * update.scaling
        b[:, :count] = own


def _masked(mask: Tensor, product: Callable[[], Tensor]) -> Tensor:
    """``A x`` [T, ..., R] where ``mask`` [T, ranks] is, R as many ranks or several times them."""
    between = product().unflatten(-1, (-1, mask.shape[1]))
    shape = (len(mask), *(1,) * (between.ndim - 2), mask.shape[1])
    return torch.where(mask.view(shape), between, 0).flatten(-2)
