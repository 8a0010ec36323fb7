"""The latent cache in Megatron's ``StaticInferenceContext``: requests of equal length."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.core_attention.device_table import in_use, to_device
from absorbed_mla.inference.decode_context_parallel.layout import CacheShares
from absorbed_mla.inference.latent_memory import LatentMemory
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import CachePart, RowLengths
from absorbed_mla.options import AbsorbedMLAOptions


class StaticCache:
    """See :class:`~absorbed_mla.inference.step.LatentCache`; allocates on the first forward."""

    name = "static"
    summary = "StaticInferenceContext: requests of equal length, later positions in host memory"

    def why_not(self, context: Any) -> str | None:
        """See :class:`LatentCache`."""
        if not hasattr(context, "is_static_batching") or not context.is_static_batching():
            return "it needs a StaticInferenceContext"
        return None

    def open(
        self,
        context: Any,
        layer_number: int,
        layer_offset: Callable[[], int],
        kv: Tensor,
        options: AbsorbedMLAOptions,
        owner: object,
    ) -> StaticStep:
        """See :class:`LatentCache`."""
        return StaticStep(context, layer_number, kv, options, owner)


class StaticStep:
    """One forward of a batch whose requests all hold the same number of tokens.

    The context keeps two tensors under the layer's number, [positions, max_batch_size, C + R]:
    the latents of the first positions on the device, those of the others in host memory (none by
    default). Its own ``swap_key_value_dict`` reorders requests in both. Index keys lie beside them,
    in the same form, under ``(layer_number, "index_keys")``.

    Args:
        context: Megatron's; its ``sequence_len_offset`` and ``batch_size_offset`` say where the
            new tokens go.
        layer_number: Key of the layer in the context.
        kv: Latents of the new tokens, [S, B, C + R].
        options: Read for ``latent_cache_tokens`` and ``context_chunk_size``.
        owner: See :class:`LatentCache`.

    Raises:
        ValueError: If the new tokens do not fit into the context, or follow another model's.
    """

    ranks: CacheShares | None = None
    shares = None
    whole_prompts = None
    cascade = None

    def __init__(
        self,
        context: Any,
        layer_number: int,
        kv: Tensor,
        options: AbsorbedMLAOptions,
        owner: object,
    ) -> None:
        tokens, batch, _ = kv.shape
        self.offset, first = int(context.sequence_len_offset), int(context.batch_size_offset)
        self.requests = slice(first, first + batch)
        self.max_position = self.offset + tokens
        _require_fits("max_sequence_length", context.max_sequence_length, self.max_position)
        _require_fits("max_batch_size", context.max_batch_size, self.requests.stop)
        self.memory = _memory(context, layer_number, kv, options)
        _claim(context, layer_number, owner)
        self.context, self.layer_number = context, layer_number
        self.block_size, self.windowed = self.memory.block_size, self.memory.windowed
        self.lengths = RowLengths((tokens,) * batch, (self.max_position,) * batch)
        self.rows = _rows(context, self.lengths, kv.device)
        self.tables = DerivedTables()

    def positions(self) -> Tensor | slice:
        """See :class:`InferenceStep`."""
        batch = len(self.rows)
        if batch == 1:
            return slice(self.offset, self.max_position)
        device = self.rows.query_starts.device
        return torch.arange(self.offset, self.max_position, device=device).repeat(batch)

    def pack(self, x: Tensor) -> Tensor:
        """See :class:`InferenceStep`."""
        return x.transpose(0, 1).reshape(-1, 1, x.shape[-1])

    pack_queries = pack

    def unpack(self, x: Tensor) -> Tensor:
        """See :class:`InferenceStep`."""
        tokens = self.max_position - self.offset
        return x.view(len(self.rows), tokens, x.shape[-1]).transpose(0, 1)

    def write(self, kv: Tensor) -> None:
        """See :class:`InferenceStep`."""
        self.memory.write(self.offset, self.requests, self.unpack(kv))

    def slots(self) -> None:
        """See :class:`InferenceStep`; tokens of a request lie one after the other."""

    def write_index_keys(self, keys: Tensor, indexed: Sequence[int]) -> Tensor:
        """See :class:`InferenceStep`; a request is one block."""
        memory = _index_keys(self.context, self.layer_number, keys)
        memory[self.offset : self.max_position, self.requests] = self.unpack(keys)
        return memory[:, self.requests].transpose(0, 1)

    def parts(self, end: int | None = None) -> Iterator[CachePart]:
        """See :class:`InferenceStep`."""
        return self.memory.parts(self.rows, self.requests, end or self.max_position)


def _rows(context: Any, lengths: RowLengths, device: torch.device) -> Rows:
    """The tables of a forward, made once for all layers; a request is one block of the cache."""

    def make() -> Rows:
        requests = range(len(lengths.queries))
        blocks = to_device(lambda: torch.tensor(requests, dtype=torch.int32)[:, None], device)
        return Rows.of(lengths.queries, lengths.keys, blocks)

    # They are copied to the device in the order of one stream, on which alone they may be read.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    tables = vars(context).setdefault("latent_tables", DerivedTables(maxsize=8))
    rows: Rows = tables.get((lengths, device, stream), make)
    in_use(rows.query_starts)  # and with it both lengths, which are views of the same memory
    in_use(rows.block_table)
    return rows


def _require_fits(name: str, limit: int, needed: int) -> None:
    if needed > limit:
        raise ValueError(
            f"the inference context has {name}={limit}, but this forward needs {needed}; "
            f"make the context with a larger {name}"
        )


def _claim(context: Any, layer_number: int, owner: object) -> None:
    """Refuse to continue prompts that another model began in this context.

    The shapes of another model of the same dimensions would fit.
    """
    owners = vars(context).setdefault("latent_owners", {})
    last = owners.get(layer_number)
    begun = int(context.sequence_len_offset) or int(context.batch_size_offset)
    if begun and last is not None and last() is not owner:
        raise ValueError(
            f"the inference context holds another model's latents for layer {layer_number}; use "
            "one context per model"
        )
    owners[layer_number] = weakref.ref(owner)


def _memory(
    context: Any, layer_number: int, kv: Tensor, options: AbsorbedMLAOptions
) -> LatentMemory:
    """The layer's latents, allocated on first use."""
    positions, batch = context.max_sequence_length, context.max_batch_size
    resident = min(positions, options.latent_cache_tokens or positions)
    memory = context.key_value_memory_dict
    if layer_number not in memory:
        pinned = kv.is_cuda and resident < positions
        memory[layer_number] = (
            kv.new_empty(resident, batch, kv.shape[-1]),
            torch.empty(
                positions - resident, batch, kv.shape[-1], dtype=kv.dtype, pin_memory=pinned
            ),
        )
    near, far = memory[layer_number]
    _require_alike("latents", near, (resident, batch, kv.shape[-1]), kv, layer_number)
    if kv.is_cuda and len(far) and not far.is_pinned():  # Megatron reordered requests
        far = far.pin_memory()
        memory[layer_number] = (near, far)
    return LatentMemory(near, far, max(1, options.context_chunk_size // batch))


def _index_keys(context: Any, layer_number: int, keys: Tensor) -> Tensor:
    """The layer's index keys [positions, max_batch_size, Di], allocated on first use."""
    shape = (context.max_sequence_length, context.max_batch_size, keys.shape[-1])
    memory, name = context.key_value_memory_dict, (layer_number, "index_keys")
    if name not in memory:
        memory[name] = (keys.new_empty(shape), keys.new_empty(0, *shape[1:]))
    found: Tensor = memory[name][0]
    _require_alike("index keys", found, shape, keys, layer_number)
    return found


def _require_alike(
    what: str, held: Tensor, shape: tuple[int, ...], new: Tensor, layer_number: int
) -> None:
    """Check that a context holds tensors of this shape, of the new ones' dtype and device."""
    if held.shape != shape or held.dtype != new.dtype or held.device != new.device:
        raise ValueError(
            f"the inference context holds {what} {held.dtype} {tuple(held.shape)} on {held.device} "
            f"for layer {layer_number}, not this layer's {new.dtype} {shape} on {new.device}; "
            "use one context per model"
        )


ENTRY = StaticCache()
