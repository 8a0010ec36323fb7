"""Selections of generated requests, laid out as the training forward needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.dsa.replay import Selections, selecting_layers
from absorbed_mla.dsa.selection import first_keys
from absorbed_mla.sequences import SequenceLayout, layout_of


@dataclass(frozen=True, eq=False)
class RequestSelections:
    """What was chosen for the tokens of one request.

    Attributes:
        num_tokens: Tokens that went through the model: the prompt, and all generated ones but the
            last.
        topk: Most keys of a token.
        chosen: By the name of a layer's core attention in the model: int32 [num_tokens, topk] on
            the CPU, positions in the request, ascending, then -1; None where no token had a choice.
    """

    num_tokens: int
    topk: int
    chosen: dict[str, Tensor | None]

    @classmethod
    def of(cls, model: nn.Module | Sequence[nn.Module], indexer_topk: Any) -> RequestSelections:
        """Of what an engine returned, for the layers of the model that trains.

        Args:
            model: Of this rank, as :func:`~absorbed_mla.dsa.replay.replay_selections` gets it; a
                pipeline stage takes its layers.
            indexer_topk: int32 [num_tokens, layers with an indexer, topk], as the attribute of
                ``CompletionOutput``, or of ``absorbed_mla.rollout_formats``; from the prompt's
                first token on.

        Raises:
            ValueError: If it has other layers or another topk than the model, a token has no key,
                or one that comes after it.
        """
        layers = selecting_layers(model)
        layers = {name: one for name, one in layers.items() if not one.is_mtp_layer}
        if not layers:
            raise ValueError(
                "indexer_topk is for layers of the decoder; the model has an MTP layer"
            )
        if indexer_topk is None:
            raise ValueError("indexer_topk must be [tokens, layers, topk], got None")
        found = torch.as_tensor(indexer_topk)
        any_layer = next(iter(layers.values()))
        indexed = any_layer.indexed_layers
        if found.ndim != 3 or tuple(found.shape[1:]) != (len(indexed), any_layer.dsa.topk):
            raise ValueError(
                f"indexer_topk must be [tokens, {len(indexed)} layers with an indexer, "
                f"{any_layer.dsa.topk}], got {tuple(found.shape)}"
            )
        last = torch.arange(len(found))[:, None]
        wrong = (found[..., 0] < 0) | (found.amax(-1) > last)
        if wrong.any():
            token, layer = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"indexer_topk must have keys of every token, none of them after it, got "
                f"{found[token, layer, :4].tolist()} ... for token {token} in layer {layer} of "
                "those with an indexer"
            )
        places = {name: indexed.index(one.layer_number) for name, one in layers.items()}
        chosen = {name: found[:, place] for name, place in places.items()}
        return cls(len(found), any_layer.dsa.topk, dict(chosen))


def training_selections(
    microbatches: Sequence[Sequence[RequestSelections]],
    layouts: Sequence[PackedSeqParams | int],
    cp_group: dist.ProcessGroup | None = None,
) -> Selections:
    """What :func:`~absorbed_mla.dsa.replay.replay_selections` takes, for forwards over requests.

    A sequence begins with the tokens of its request that went through the model. What follows them
    in the sequence (the last generated token, padding of a batch) has no record and chooses no key,
    like padding between the sequences of a pack: attention gives 0 there, which no earlier token
    sees.

    Args:
        microbatches: Of every forward, its requests in the order of the sequences.
        layouts: Of every forward, Megatron's ``packed_seq_params`` of the whole pack (``thd``), or
            the number of tokens that the sequences of a batch (``sbhd``) are padded to.
        cp_group: The context-parallel ranks of the forwards; a rank gets its queries. None for one.

    Returns:
        Selections int32 [tokens of this rank, batch, topk] on the CPU.

    Raises:
        ValueError: If numbers of forwards or sequences differ, requests are of different models, or
            a sequence is shorter than its request.
    """
    if len(microbatches) != len(layouts):
        raise ValueError(f"there are {len(microbatches)} microbatches and {len(layouts)} layouts")
    every = [request for requests in microbatches for request in requests]
    if not every:
        raise ValueError("microbatches must have requests, got none")
    names, topk = every[0].chosen.keys(), every[0].topk
    if any(one.chosen.keys() != names or one.topk != topk for one in every):
        raise ValueError("the requests must be of one model, got other layers or another topk")
    found: Selections = {name: [] for name in names}
    for requests, given in zip(microbatches, layouts):
        layout = layout_of(given, [one.num_tokens for one in requests])
        for name in names:
            found[name].append(_of_forward(name, requests, layout, topk, cp_group))
    return found


def _of_forward(
    name: str,
    requests: Sequence[RequestSelections],
    layout: SequenceLayout,
    topk: int,
    cp_group: dist.ProcessGroup | None,
) -> Tensor | None:
    """The selection of a layer, int32 [S_q, B, topk]; None where no sequence exceeds topk."""
    if topk >= max(layout.lengths):
        return None
    # One column for each sequence of a batch; a pack has one for all.
    batch = 1 if layout.packed else len(requests)
    whole = torch.full((layout.num_tokens, batch, topk), -1, dtype=torch.int32)
    for i, request in enumerate(requests):
        column, start = (0, layout.starts[i]) if layout.packed else (i, 0)
        rows = request.chosen[name]
        if rows is None:
            rows = all_keys(request.num_tokens, topk)
        # -1 stays -1.
        moved = torch.where(rows >= 0, rows + start, rows)
        whole[start : start + request.num_tokens, column] = moved
    if cp_group is None or cp_group.size() == 1:
        return whole
    cut = ContextParallelLayout.of(layout, cp_group.size(), cp_group.rank())
    return whole[cut.tokens()]


def all_keys(num_tokens: int, topk: int) -> Tensor:
    """Of every token all keys that it sees, int32 [num_tokens, topk]; right for the first topk."""
    return first_keys(torch.arange(1, num_tokens + 1), topk)
