"""Texts that a model has generated, and the forwards that train on them."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tests.support import world
from tests.support.layouts import Layout, packed


@dataclass(frozen=True)
class Rollout:
    """A model, texts that it generated, and what was recorded of each meanwhile."""

    model: torch.nn.Module
    texts: list[list[int]]
    requests: list[Any]

    def forward(self, layout: Layout | int, order=slice(None), model=None) -> Tensor:
        """Log-probabilities of the texts' tokens but the first, in a batch or a pack."""
        texts = self.texts[order]
        if isinstance(layout, int):
            rows = [[*text, *[0] * (layout - len(text))] for text in texts]
            places = [(i, 0) for i in range(len(texts))]
            params = None
        else:
            params = layout.packed_seq_params(world.device())
            slots = layout.slots or layout.lengths
            padded = [[*text, *[0] * (slot - len(text))] for text, slot in zip(texts, slots)]
            rows, places = [[*chain(*padded)]], [(0, sum(slots[:i])) for i in range(len(texts))]
        ids = torch.tensor(rows, device=world.device())
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        logits = (model or self.model)(ids, positions, None, packed_seq_params=params)
        found = []
        for text, (row, start) in zip(texts, places):
            rows = logits[row, start : start + len(text) - 1].log_softmax(-1)
            found.append(rows.gather(-1, ids.new_tensor(text[1:])[:, None]))
        return torch.cat(found)

    def laid_out(self, lay_out, layout: Layout | int):
        """What ``training_selections``, or another such function, makes of the requests."""
        given = layout if isinstance(layout, int) else layout.packed_seq_params(world.device())
        return lay_out([self.requests], [given])

    def layouts(self, tokens: int) -> dict[str, Layout | int]:
        """A batch padded to ``tokens``, a pack, and one with padding."""
        lengths = [len(text) for text in self.texts]
        return {
            "sbhd": tokens,
            "thd": packed(lengths),
            "thd_padded": packed(lengths, [-(-n // 4) * 4 + 4 for n in lengths]),
        }
