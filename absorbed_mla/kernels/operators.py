"""The kernels of attention as custom operators of PyTorch, without autograd.

They take tensors and numbers only, so that ``torch.compile`` does not trace into them and a CUDA
graph records them. Triton is imported with the first call.
"""

from __future__ import annotations

import functools
import importlib
from functools import partial

import torch
from torch import Tensor

from absorbed_mla.kernels.latent_backward import LatentBackward
from absorbed_mla.kernels.paged.call import PagedCall
from absorbed_mla.kernels.registration import operator


@operator
def latent_attention_forward(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    query_tiles: Tensor,
    scale: float,
    kernel: str,
    record_largest: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [S_q, B, N, C] and LSE [S_q, B, N] of ``kernels/<kernel>/forward.py``.

    The third tensor, if asked for, is the largest score of every row [S_q, B, N] fp32, else empty.
    An operator that wrote into it instead could not be called without it: torch 2.11 raises.
    """
    module = _kernel_module(kernel, "forward")
    largest = _largest(q_content, record_largest)
    recorded = largest if record_largest else None
    # Triton launches on the current device, whichever device the tensors are on.
    with torch.cuda.device_of(q_content):
        result = module.forward(q_content, q_rope, latent, k_rope, query_tiles, scale, recorded)
    return *result, largest


def _largest(query: Tensor, recorded: bool) -> Tensor:
    shape = query.shape[:3] if recorded else (0,)
    return query.new_empty(shape, dtype=torch.float32)


def _output_and_lse(query: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """What attention returns for a query, for shapes without data; of values as wide as it."""
    *rows, own = query.shape
    return query.new_empty(*rows, width or own), query.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake(latent_attention_forward)
def _(q_content, q_rope, latent, k_rope, query_tiles, scale, kernel, record_largest=False):
    return *_output_and_lse(q_content), _largest(q_content, record_largest)


@operator
def latent_attention_in_pieces(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    query_tiles: Tensor,
    sequences: Tensor,
    blocks: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    record_largest: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`latent_attention_forward`, in KV splits: ``hopper/forward_in_pieces.py``."""
    module = _kernel_module("hopper", "forward_in_pieces")
    largest = _largest(q_content, record_largest)
    inputs = q_content, q_rope, latent, k_rope, query_tiles
    lists = sequences, blocks, most_queries, most_keys
    with torch.cuda.device_of(q_content):
        recorded = largest if record_largest else None
        return *module.forward_in_pieces(*inputs, *lists, scale, recorded), largest


@torch.library.register_fake(latent_attention_in_pieces)
def _(q_content, q_rope, latent, k_rope, tiles, starts, blocks, queries, keys, scale, record=False):
    return *_output_and_lse(q_content), _largest(q_content, record)


@operator
def multi_head_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_tiles: Tensor,
    scale: float,
    record_largest: bool = False,
    window: int | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [S_q, B, N, V] and LSE [S_q, B, N] of ``kernels/hopper/multi_head.py``.

    The third tensor is that of :func:`latent_attention_forward`.
    """
    module = _kernel_module("hopper", "multi_head")
    largest = _largest(q, record_largest)
    recorded = largest if record_largest else None
    with torch.cuda.device_of(q):
        return *module.forward(q, k, v, query_tiles, scale, recorded, window, sink), largest


@torch.library.register_fake(multi_head_attention_forward)
def _(q, k, v, query_tiles, scale, record_largest=False, window=None, sink=None):
    return *_output_and_lse(q, v.shape[3]), _largest(q, record_largest)


@operator
def multi_head_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_tiles: Tensor,
    num_buffers: int,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sink of ``kernels/hopper/multi_head_backward.py``.

    The last has no element where there is no sink.
    """
    module = _kernel_module("hopper", "multi_head_backward")
    saved = (grad_out, grad_lse, q, k, v, out, lse)
    with torch.cuda.device_of(q):
        *found, of_sink = module.backward(*saved, key_tiles, num_buffers, scale, window, sink)
    return *found, lse.new_empty(0) if of_sink is None else of_sink


@torch.library.register_fake(multi_head_attention_backward)
def _(grad_out, grad_lse, out, lse, q, k, v, key_tiles, num_buffers, scale, window=None, sink=None):
    of_sink = lse.new_empty(0 if sink is None else len(sink))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sink


@operator
def latent_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    query_tiles: Tensor,
    key_tiles: Tensor | None,
    num_buffers: int,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query's two parts, and of [latent | k_rope] in fp32 [S_k, B, C + R].

    Computed by ``kernels/<kernel>/backward.py``, which also describes the tiles, or, if ``hopper``
    is given ``key_tiles``, by ``stored_backward.py``, whose ``parts`` they are; only ``triton``
    reads ``num_buffers``.
    """
    saved = (grad_out, grad_lse, out, lse, q_content, q_rope, latent, k_rope)
    call = LatentBackward(*saved, scale)
    with torch.cuda.device_of(q_content):
        if kernel == "hopper" and key_tiles is not None:
            module = _kernel_module(kernel, "stored_backward")
            return module.backward_stored(call, query_tiles, key_tiles)
        module = _kernel_module(kernel, "backward")
        if kernel == "triton":
            assert key_tiles is not None
            return module.backward(call, query_tiles, key_tiles, num_buffers)
        return module.backward(call, query_tiles)


@torch.library.register_fake(latent_attention_backward)
def _(grad_out, grad_lse, out, lse, q_content, q_rope, latent, k_rope, *rest):
    return _latent_gradients(q_content, q_rope, latent, k_rope)


def _latent_gradients(q_content, q_rope, latent, k_rope):
    dkv_shape = (*latent.shape[:2], latent.shape[2] + k_rope.shape[2])
    return (
        q_content.new_empty(q_content.shape),
        q_rope.new_empty(q_rope.shape),
        latent.new_empty(dkv_shape, dtype=torch.float32),
    )


@operator
def paged_attention_forward(
    q_content: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    query_lengths: Tensor,
    kv_lengths: Tensor,
    block_table: Tensor,
    max_query_length: int,
    max_kv_length: int,
    scale: float,
    key_start: int,
    key_end: int | None,
    batch_invariant: bool,
    num_splits: int | None = None,
    prefixes: int = 0,
    kernel: str = "triton",
    tiles: Tensor | None = None,
    starts: Tensor | None = None,
    token_tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [T, N, C] and LSE [T, N] of ``kernels/paged/forward.py`` or ``hopper/decode.py``.

    The arguments are the fields of :class:`PagedCall`, which an operator of PyTorch cannot take.
    ``tiles`` to ``token_tiles`` are what :func:`paged_schedule` gave; without them they are made.
    """
    lists = query_starts, query_lengths, kv_lengths, block_table
    keys = max_query_length, max_kv_length, scale, key_start, key_end
    call = PagedCall(q_content, q_rope, cache, *lists, *keys, batch_invariant, num_splits, prefixes)
    tables = tiles, starts, token_tiles
    table = None if tiles is None else _kernel_module("paged", "schedule").Schedule(*tables)
    with torch.cuda.device_of(q_content):
        return _paged_module(kernel).forward(call, table)


@torch.library.register_fake(paged_attention_forward)
def _(q_content, q_rope, cache, *rest):
    return _output_and_lse(q_content)


def paged_schedule(call: PagedCall, kernel: str) -> tuple[Tensor | None, ...]:
    """The tables of ``kernels/paged/schedule.py`` for calls that differ in the values only.

    Empty where there is nothing to attend to.
    """
    if not (len(call.q_content) and call.has_keys):
        return ()
    with torch.cuda.device_of(call.q_content):
        division = _paged_module(kernel).divide(call)
        tables = _kernel_module("paged", "schedule")
        tokens = len(call.q_content)
        return tables.schedule(*call.lengths, call.key_start, division, call.prefixes, tokens)


def _paged_module(kernel: str):
    names = ("hopper", "decode") if kernel == "hopper" else ("paged", "forward")
    return _kernel_module(*names)


def _attend_sparse(kernel: str, operands, lists_of, topk: int, scale: float, scales=None):
    """By ``dsa/forward.py``, as it is in parity mode if ``invariant``, or hopper/sparse_forward.py.

    Arguments are theirs.
    """
    arguments = *operands, lists_of, topk, scale
    if kernel == "hopper":
        return _kernel_module("hopper", "sparse_forward").attend(*arguments)
    return _kernel_module("dsa", "forward").attend(*arguments, scales, kernel == "invariant")


@operator
def sparse_attention_forward(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    chosen: Tensor,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Output [S_q, B, N, C] and LSE of ``dsa/forward.py`` or ``hopper/sparse_forward.py``.

    The chosen keys are int32 [S_q, B, topk], none twice for a query; -1 for none, anywhere.
    """
    lists_of = partial(_kernel_module("dsa", "key_lists").key_lists, chosen)
    with torch.cuda.device_of(q_content):
        operands = q_content, q_rope, latent, k_rope
        return _attend_sparse(kernel, operands, lists_of, chosen.shape[2], scale)


@torch.library.register_fake(sparse_attention_forward)
def _(q_content, *rest):
    return _output_and_lse(q_content)


@operator
def sparse_attention_cached(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    scales: Tensor | None,
    k_rope: Tensor,
    chosen: Tensor,
    query_starts: Tensor,
    query_lengths: Tensor,
    block_table: Tensor,
    block_size: int,
    of_block: int,
    of_position: int,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """As ``sparse_attention_forward`` of queries [T, N, ..] over slots of a cache [slots, 1, ..].

    The chosen positions int32 [T, topk] and the rest are those of ``kernels/dsa/topk_slots.py``.
    With ``scales``, which ``hopper`` does not take, slots are FP8 rows in the parts of
    ``fp8_latents.Fp8Parts``.
    """
    places = query_starts, query_lengths, block_table, block_size, of_block, of_position
    lists = _kernel_module("dsa", "topk_slots")
    lists_of = partial(lists.topk_slots, chosen, lists.Places(*places))
    with torch.cuda.device_of(q_content):
        operands = q_content.unsqueeze(1), q_rope.unsqueeze(1), latent, k_rope
        out, lse = _attend_sparse(kernel, operands, lists_of, chosen.shape[1], scale, scales)
    return out.squeeze(1), lse.squeeze(1)


@torch.library.register_fake(sparse_attention_cached)
def _(q_content, *rest):
    return _output_and_lse(q_content)


@operator
def sparse_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    chosen: Tensor,
    scale: float,
    deterministic: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query's two parts, and of [latent | k_rope] in fp32 [S_k, B, C + R]."""
    saved = (grad_out, grad_lse, out, lse, q_content, q_rope, latent, k_rope)
    names = ("hopper", "sparse_backward") if kernel == "hopper" else ("dsa", "backward")
    with torch.cuda.device_of(q_content):
        call = LatentBackward(*saved, scale)
        return _kernel_module(*names).backward(call, chosen, deterministic)


@torch.library.register_fake(sparse_attention_backward)
def _(grad_out, grad_lse, out, lse, q_content, q_rope, latent, k_rope, *rest):
    return _latent_gradients(q_content, q_rope, latent, k_rope)


@functools.cache
def _kernel_module(kernel: str, direction: str):
    """Import the kernels, and with them Triton, which this module can do without."""
    return importlib.import_module(f"absorbed_mla.kernels.{kernel}.{direction}")
