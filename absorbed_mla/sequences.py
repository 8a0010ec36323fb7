"""Boundaries of the sequences along the token axis, and the position of each token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from absorbed_mla.caching import DerivedTables
from absorbed_mla.prefix_tree import PrefixTree


@dataclass(frozen=True)
class SequenceLayout:
    """Boundaries of sequences along the token axis of ``sbhd`` and ``thd`` tensors, as integers.

    Attributes:
        num_tokens: Length S of the token axis, over all tensor-parallel ranks.
        starts: First token of each sequence.
        lengths: Tokens of each sequence, without the padding after it.
        slots: Tokens of each sequence with the padding after it.
        packed: Whether the token axis holds several sequences (``thd``).
        tree: Which sequences continue which; None where each is whole.
        tables: What the attention derives from this layout. All layers of a model get the same
            object for equal sequences, so each table is made once.
    """

    num_tokens: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    packed: bool
    tree: PrefixTree | None = None
    tables: DerivedTables = field(
        default_factory=DerivedTables, init=False, compare=False, repr=False
    )

    @functools.cached_property
    def _hash(self) -> int:
        return hash(
            (self.num_tokens, self.starts, self.lengths, self.slots, self.packed, self.tree)
        )

    def __hash__(self) -> int:
        """Computed once: a pack has thousands of numbers, and every layer looks its tables up."""
        return self._hash

    @classmethod
    def dense(cls, num_tokens: int) -> SequenceLayout:
        """One sequence of ``num_tokens`` along the axis (``sbhd``; the batch is another axis)."""
        return _dense(num_tokens)

    @classmethod
    def pack(cls, lengths: tuple[int, ...]) -> SequenceLayout:
        """Sequences of these lengths one after the other, without padding."""
        starts = (0, *accumulate(lengths))
        return _shared(cls(starts[-1], starts[:-1], lengths, lengths, packed=True))

    @classmethod
    def from_host(cls, params: PackedSeqParams | None, num_tokens: int) -> SequenceLayout:
        """Read Megatron's ``packed_seq_params``; None means one dense sequence.

        Raises:
            ValueError: If the boundaries are malformed or do not cover ``num_tokens``.
        """
        if params is None:
            return cls.dense(num_tokens)
        if params.qkv_format == "sbhd" and params.cu_seqlens_q is None:
            return cls.dense(num_tokens)
        if params.qkv_format != "thd":
            raise ValueError(
                "packed_seq_params.qkv_format must be 'thd' where cu_seqlens are given, "
                f"got {params.qkv_format!r}"
            )
        bounds = _boundaries("cu_seqlens_q", params.cu_seqlens_q)
        padded = bounds
        if params.cu_seqlens_q_padded is not None:
            padded = _boundaries("cu_seqlens_q_padded", params.cu_seqlens_q_padded)
        for name in ("cu_seqlens_q", "cu_seqlens_q_padded"):
            other = name.replace("_q", "_kv")
            # Usually the same tensor. Comparing values would wait for the GPU once more.
            if getattr(params, other) is not getattr(params, name):
                expected = bounds if name == "cu_seqlens_q" else padded
                _require_same(other, getattr(params, other), name, expected)
        tree = getattr(params, "prefix_tree", None)
        return cls._packed(bounds, padded, num_tokens, tree)

    @classmethod
    def _packed(
        cls, bounds: list[int], padded: list[int], num_tokens: int, tree: PrefixTree | None
    ) -> SequenceLayout:
        name = "cu_seqlens_q" if padded is bounds else "cu_seqlens_q_padded"
        if len(padded) != len(bounds):
            raise ValueError(
                f"cu_seqlens_q_padded has {len(padded)} entries, cu_seqlens_q has {len(bounds)}"
            )
        if padded[-1] != num_tokens:
            raise ValueError(f"{name} ends at {padded[-1]}, but there are {num_tokens} tokens")
        lengths = tuple(b - a for a, b in zip(bounds, bounds[1:]))
        slots = tuple(b - a for a, b in zip(padded, padded[1:]))
        for i, (length, slot) in enumerate(zip(lengths, slots)):
            if length > slot:
                raise ValueError(
                    f"sequence {i} has {length} tokens by cu_seqlens_q, "
                    f"but only {slot} by cu_seqlens_q_padded"
                )
        if tree is not None and (tree.lengths, tree.padded_lengths) != (lengths, slots):
            raise ValueError(
                "packed_seq_params.cu_seqlens_q must be the boundaries of the nodes of its "
                f"prefix_tree, {tree.lengths} tokens, padded {tree.padded_lengths}; got {lengths}, "
                f"padded {slots}"
            )
        return _shared(cls(num_tokens, tuple(padded[:-1]), lengths, slots, packed=True, tree=tree))

    @property
    def max_position(self) -> int:
        """Upper bound of all positions: a table of this many rows has each of them."""
        return max((base + slot for base, slot in zip(self.bases, self.slots)), default=0)

    @property
    def bases(self) -> tuple[int, ...]:
        """Position of the first token of each sequence."""
        return self.tree.bases if self.tree else (0,) * len(self.starts)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of each whole sequence, its prefixes included."""
        return self.tree.sequence_lengths if self.tree else self.lengths

    def runs(self) -> list[tuple[int, int]]:
        """First token and number of tokens of every sequence."""
        return list(zip(self.starts, self.lengths))

    def segments(self) -> list[tuple[int, int]]:
        """(start, end) of every sequence that is not empty, without its padding."""
        return [(s, s + n) for s, n in zip(self.starts, self.lengths) if n]

    def positions(self, device: torch.device) -> Tensor:
        """Position of each token in its sequence, int64 [S]; padding continues the count."""
        tokens = torch.arange(self.num_tokens, device=device)
        if not self.packed:
            return tokens
        return tokens - self.zeros(device).repeat_interleave(
            torch.tensor(self.slots, device=device), output_size=self.num_tokens
        )

    def zeros(self, device: torch.device | None = None) -> Tensor:
        """Where position 0 of each sequence is, or would be, on the token axis, int64."""
        return torch.tensor([s - base for s, base in zip(self.starts, self.bases)], device=device)


def layout_of(given: PackedSeqParams | int, lengths: Sequence[int]) -> SequenceLayout:
    """The sequences of a training forward, each of which begins with a generated request.

    Args:
        given: Megatron's ``packed_seq_params`` of the whole pack, or the number of tokens that the
            sequences of a batch are padded to.
        lengths: Tokens of the requests that went through the model, in the order of the sequences.

    Raises:
        ValueError: If there are more or fewer sequences, or one is shorter than its request.
    """
    if isinstance(given, int):
        layout = SequenceLayout.dense(given)
        found = layout.lengths * len(lengths)
    else:
        padded = given.cu_seqlens_q_padded
        bounds = given.cu_seqlens_q if padded is None else padded
        layout = SequenceLayout.from_host(given, int(bounds[-1]))
        if layout.tree is not None:
            raise ValueError(
                "packed_seq_params must have prefix_tree=None to replay choices of generated "
                "requests: each has choices of its own for the tokens that they share"
            )
        found = layout.lengths
    if not lengths or len(found) != len(lengths):
        raise ValueError(f"a layout has {len(found)} sequences for {len(lengths)} requests")
    for i, (length, needed) in enumerate(zip(found, lengths)):
        if length < needed:
            raise ValueError(
                f"sequence {i} must have the {needed} tokens of its request that went through the "
                f"model, or more; got {length}"
            )
    return layout


@functools.lru_cache(maxsize=16)
def _dense(num_tokens: int) -> SequenceLayout:
    """Found by its length alone: every layer looks it up in every step."""
    return _shared(SequenceLayout(num_tokens, (0,), (num_tokens,), (num_tokens,), packed=False))


@functools.lru_cache(maxsize=16)
def _shared(layout: SequenceLayout) -> SequenceLayout:
    """One object for equal layouts, so that all layers share its tables; the latest 16 are kept."""
    return layout


def _boundaries(name: str, cu_seqlens: Tensor | None) -> list[int]:
    """The entries of ``cu_seqlens`` as integers, checked."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"packed_seq_params.{name} must be a 1-d tensor of at least 2 entries for 'thd', "
            f"got {_describe(cu_seqlens)}"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"packed_seq_params.{name} must be int32 or int64, got {cu_seqlens.dtype}")
    bounds = _read(cu_seqlens)
    if bounds[0] != 0 or any(b < a for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"packed_seq_params.{name} must start at 0 and not decrease, got {bounds}")
    return bounds


# cu_seqlens on a GPU -> (its version, its entries); an entry ends with its tensor.
_entries: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _read(cu_seqlens: Tensor) -> list[int]:
    """Entries of ``cu_seqlens``; those on a GPU are copied once for all layers.

    Copying waits for all queued work of the GPU. Changes are noticed by the tensor's version, which
    a write through ``.data`` or by a kernel unknown to PyTorch does not raise: after such a write,
    pass a new tensor (``clone``).
    """
    # Reading CPU memory is cheap, and numpy may share it; inference tensors have no version.
    if not cu_seqlens.is_cuda or cu_seqlens.is_inference():
        return cu_seqlens.tolist()
    version, entries = _entries.get(cu_seqlens, (None, None))
    if version != cu_seqlens._version:
        entries = cu_seqlens.tolist()
        _entries[cu_seqlens] = (cu_seqlens._version, entries)
    return entries


def _require_same(name: str, value: Tensor | None, other: str, bounds: list[int]) -> None:
    if value is not None and _boundaries(name, value) != bounds:
        raise ValueError(
            f"packed_seq_params.{name} must equal {other} in self-attention, "
            f"got {value.tolist()} and {bounds}"
        )


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
