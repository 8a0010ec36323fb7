"""Attention masks that are redundant beside causality and cu_seqlens; others are refused."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from absorbed_mla.sequences import SequenceLayout

# Rows of the mask at a time, so that what is compared with it takes little memory.
_ROWS = 1024
# mask -> (its version, layout, causal, query tokens, the answer); an entry ends with its mask.
_answers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def refuse_hidden_keys(
    mask: Tensor, layout: SequenceLayout, query_tokens: Tensor, causal: bool
) -> None:
    """Refuse a mask beside what says already which keys are seen; see :func:`hides_more`.

    Raises:
        ValueError: If it hides one of them.
    """
    if hides_more(mask, layout, query_tokens, causal):
        seen = "packed_seq_params show" if layout.packed else "sparse attention may choose"
        raise ValueError(
            f"attention_mask must be None, or hide no key (True hides one) that {seen}"
            f"{', besides later ones' if causal else ''}; one of shape {tuple(mask.shape)} does"
        )


def hides_more(mask: Tensor, layout: SequenceLayout, query_tokens: Tensor, causal: bool) -> bool:
    """Whether a mask hides a key that a query sees without it.

    It waits for the device, once for a mask that all layers get; changes are noticed by the mask's
    version.

    Args:
        mask: Bool, True hides a key: [B or 1, 1, S_q or 1, S].
        layout: The whole sequences, of all context-parallel ranks. A query sees the keys of its
            own and of its prefixes, and padding sees none.
        query_tokens: int64 [S_q], where this rank's queries are in the whole: all in order, or the
            same tensor for all layers, since comparing values would wait for the device.
        causal: Whether a query sees only itself and earlier keys.

    Raises:
        ValueError: While a CUDA graph is captured, when the device cannot be waited for.
    """
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "attention_mask must be None where a CUDA graph is captured, in which it cannot be "
            f"compared with the sequences; got a tensor of shape {tuple(mask.shape)}"
        )
    if mask.is_inference():  # It has no version.
        return _compare(mask, layout, query_tokens, causal)
    queries = None if len(query_tokens) == layout.num_tokens else query_tokens
    asked = mask._version, layout, causal
    *known, known_queries, answer = _answers.get(mask, (None, None))
    if tuple(known) != asked or known_queries is not queries:
        answer = _compare(mask, layout, query_tokens, causal)
        _answers[mask] = *asked, queries, answer
    return answer


def _compare(mask: Tensor, layout: SequenceLayout, query_tokens: Tensor, causal: bool) -> bool:
    device = mask.device
    keys = torch.arange(layout.num_tokens, device=device)
    slots = torch.tensor(layout.slots, device=device)
    # A sequence sees itself; a shared prefix is seen by all that continue it.
    below = layout.tree.subtree_ends if layout.tree else range(1, len(slots) + 1)
    bounds = (*layout.starts, layout.num_tokens)
    starts, lengths, ends = (
        torch.tensor(values, device=device).repeat_interleave(slots)
        for values in (layout.starts, layout.lengths, [bounds[i] for i in below])
    )
    real = keys < starts + lengths
    found = torch.zeros((), dtype=torch.bool, device=device)
    for first in range(0, len(query_tokens), _ROWS):
        query = query_tokens[first : first + _ROWS, None]
        seen = (query >= starts) & (query < ends) & real & real[query]
        if causal:
            seen &= keys <= query
        rows = slice(first, first + _ROWS) if mask.shape[2] > 1 else slice(None)
        found |= (mask[:, :, rows] & seen).any()
    return bool(found)
