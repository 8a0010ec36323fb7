"""Compiles kernels for an H200 on a machine without a GPU, by the compiler that Triton brings.

A program of its own, because it replaces Triton's driver:

    python -m tests.support.hopper_compiler

It calls the launchers at DeepSeek-V3's dimensions, compiles what they launch instead of running it,
and prints a line of JSON for each kernel: its name, what memory it takes, and where Triton's cache
has it. Results are never computed, so launchers return any numbers.

A large kernel takes seconds. Where it has several options, each value of each is compiled, not each
combination; of an option that only adds code, the value that adds it.
"""

from __future__ import annotations

import gc
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from tests.support.compiled_code import idle_barriers, reduced_across_copies

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Tokens and heads: tiles of whole tokens, and both sides of a causal diagonal.
TOKENS, HEADS, KV_LORA_RANK, ROPE = 256, 128, 512, 64
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class _H200:
    """The part of a driver that compilation asks."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def _compiled_launch(self: JITFunction, grid):
    """What ``kernel[grid]`` is here: the specialisation of these arguments is compiled."""

    def launch(*args, **kwargs):
        kernel = self.warmup(*args, grid=grid, **kwargs)
        about = {"kernel": self.fn.__name__, "fp8_rows": bool(kwargs.get("GROUP"))}
        about["cache"] = get_cache_manager(kernel.hash).cache_dir
        print(json.dumps(about | _assembled(kernel)), flush=True)

    return launch


def _assembled(kernel) -> dict[str, Any]:
    """Bytes of shared memory, and of each thread's stack, where spilled registers go.

    Besides the kinds of instructions that multiply matrices, barriers that nothing uses, and
    reductions that Triton 3.6 makes wrong.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    [stack] = re.findall(r"STACK:(\d+)", done.stdout)
    [registers] = re.findall(r"REG:(\d+)", done.stdout)
    found = {"shared": kernel.metadata.shared, "stack": int(stack)}
    products = sorted({*re.findall(r"wgmma\.mma_async|mma\.sync", kernel.asm["ptx"])})
    ttgir = kernel.asm["ttgir"]
    found |= {"registers": int(registers), "products": products}
    return found | {
        "idle_barriers": idle_barriers(ttgir),
        "reduced_across_copies": reduced_across_copies(ttgir),
    }


def training_kernels() -> None:
    """Forward that records the largest scores, backward that adds and that stores."""
    from absorbed_mla.core_attention.backends.hopper import ENTRY as HOPPER
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from absorbed_mla.core_attention.masks.spans import Span, Spans
    from absorbed_mla.core_attention.max_logits import MaxLogits
    from absorbed_mla.core_attention.types import AttentionInputs, OutputGradient

    shapes = [(HEADS, KV_LORA_RANK), (HEADS, ROPE), (1, KV_LORA_RANK), (ROPE,)]
    inputs = AttentionInputs(*(torch.zeros(TOKENS, 1, *s, dtype=BF16) for s in shapes), None)
    rules = ScoreRules(0.1, Spans([Span(0, TOKENS, 0, TOKENS, 0)]))
    recorded = ScoreRules(0.1, rules.spans, max_logits=MaxLogits(torch.zeros(HEADS)))
    output = HOPPER.forward(inputs, recorded)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        HOPPER.backward(OutputGradient(output.out, None), output, inputs, rules)
    torch.use_deterministic_algorithms(False)


def multi_head_kernels() -> None:
    """Forward of the expanded form, which records the largest scores, and its backward."""
    from absorbed_mla.core_attention.masks.spans import Span
    from absorbed_mla.core_attention.masks.tiles import key_tiles, query_tiles
    from absorbed_mla.kernels import operators

    q, v = (torch.zeros(TOKENS, 1, HEADS, width, dtype=BF16) for width in (192, 128))
    spans = [Span(0, TOKENS, 0, TOKENS, 0)]
    tiles = query_tiles(spans, 128, TOKENS)
    out, lse, _ = operators.multi_head_attention_forward(q, q, v, tiles, 0.1, True)
    tiles = key_tiles(spans, 128, TOKENS)
    operators.multi_head_attention_backward(out, None, out, lse, q, q, v, tiles, 1, 0.1)


def search_kernel() -> None:
    """The scores again, at the widths of the expanded form."""
    from absorbed_mla.core_attention.masks.spans import Span
    from absorbed_mla.core_attention.masks.tiles import query_tiles
    from absorbed_mla.kernels.max_logits import QUERIES, largest_scores

    q = torch.zeros(TOKENS, 1, HEADS, 192, dtype=BF16)
    tiles = query_tiles([Span(0, TOKENS, 0, TOKENS, 0)], QUERIES)
    lse = torch.zeros(1, HEADS, TOKENS).permute(2, 0, 1)
    largest_scores(q, q, lse, torch.zeros(HEADS), tiles, 0.1, 100.0)


def decode_kernels() -> None:
    """Decoding over a paged cache in splits; in parity mode piece by piece, too, for many tiles."""
    from absorbed_mla.kernels import operators

    length = 8192
    cache = torch.zeros(length // 64, 64, KV_LORA_RANK + ROPE, dtype=BF16)
    for requests, batch_invariant in ((2, False), (1, True), (128, True)):
        lists = [torch.zeros(requests, dtype=torch.int32) for _ in range(3)]
        table = torch.zeros(requests, length // 64, dtype=torch.int32)
        query = [torch.zeros(requests, HEADS, w, dtype=BF16) for w in (KV_LORA_RANK, ROPE)]
        operators.paged_attention_forward(
            *query, cache, *lists, table, 1, length, 0.1, 0, None, batch_invariant, kernel="hopper"
        )


def fp8_cache_kernels() -> None:
    """Rows of an FP8 cache written and read, and decode over them by Triton and for Hopper."""
    from absorbed_mla.fp8_latents import Fp8Latents
    from absorbed_mla.kernels import fp8_latents

    latents = Fp8Latents(KV_LORA_RANK, ROPE)
    kv = torch.zeros(64, KV_LORA_RANK + ROPE, dtype=BF16)
    rows = torch.zeros(64, latents.row_bytes, dtype=torch.uint8)
    fp8_latents.encode(kv, *latents.parts(rows))
    fp8_latents.decode(*latents.parts(rows), kv)
    fp8_decode("triton", 16)
    fp8_decode("hopper", HEADS)
    # Tiles of 16 rows in splits, and of 32 whole.
    fp8_decode("hopper", 16, 2)
    fp8_decode("hopper", 32, 128)
    # Piece by piece, for many tiles.
    fp8_decode("hopper", HEADS, 128, batch_invariant=True)


def fp8_decode(kernel: str, heads: int, requests: int = 128, batch_invariant: bool = False) -> None:
    """One new token of each request."""
    from absorbed_mla.fp8_latents import Fp8Latents
    from absorbed_mla.kernels import operators

    length, width = 8192, Fp8Latents(KV_LORA_RANK, ROPE).row_bytes
    cache = torch.zeros(length // 64, 64, width, dtype=torch.uint8)
    lists = [torch.zeros(requests, dtype=torch.int32) for _ in range(3)]
    table = torch.zeros(requests, length // 64, dtype=torch.int32)
    query = [torch.zeros(requests, heads, w, dtype=BF16) for w in (KV_LORA_RANK, ROPE)]
    operators.paged_attention_forward(
        *query, cache, *lists, table, 1, length, 0.1, 0, None, batch_invariant, kernel=kernel
    )


def sparse_kernels(kernels: str, heads: int, deterministic: bool, forward: bool = True) -> None:
    """Sparse attention, forward and one of its backwards, or that alone."""
    from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
    from absorbed_mla.dsa.sparse_reference import latent_inputs
    from absorbed_mla.kernels.dsa import key_lists
    from absorbed_mla.registry import SPARSE_BACKENDS

    # Few tokens have the tiles of many.
    key_lists._LEAST_QUERIES = 1
    sparse = SPARSE_BACKENDS[kernels]
    shapes = [(heads, KV_LORA_RANK), (heads, ROPE), (KV_LORA_RANK + ROPE,)]
    inputs = latent_inputs(*(torch.zeros(TOKENS, 1, *s, dtype=BF16) for s in shapes))
    chosen = torch.zeros(TOKENS, 1, TOKENS, dtype=torch.int32)
    output = AttentionOutput(inputs.q_content, torch.zeros(TOKENS, 1, heads))
    if forward:
        output = sparse.forward(inputs, chosen, 0.1)
    torch.use_deterministic_algorithms(deterministic)
    sparse.backward(OutputGradient(output.out, None), output, inputs, chosen, 0.1)


def decode_of_sparse_kernels(kernels: str) -> None:
    """A token in each tile, its keys in splits, which are merged."""
    from absorbed_mla.inference.rows import Rows
    from absorbed_mla.kernels.dsa import key_lists
    from absorbed_mla.registry import SPARSE_BACKENDS

    key_lists._LEAST_QUERIES = 1024
    query = [torch.zeros(32, 16, width, dtype=BF16) for width in (KV_LORA_RANK, ROPE)]
    cache = torch.zeros(64, 64, KV_LORA_RANK + ROPE, dtype=BF16)
    rows = Rows.of([1] * 32, [4096] * 32, torch.zeros(32, 64, dtype=torch.int32))
    chosen = torch.zeros(32, 2048, dtype=torch.int32)
    SPARSE_BACKENDS[kernels].forward_cached(*query, cache, rows, chosen, 0.1)


def sparse_fp8_kernels() -> None:
    """Over FP8 rows: splits of few heads, the tiles of many heads, and of several tokens."""
    from absorbed_mla.fp8_latents import Fp8Latents
    from absorbed_mla.inference.rows import Rows
    from absorbed_mla.kernels.dsa import key_lists
    from absorbed_mla.registry import SPARSE_BACKENDS

    key_lists._LEAST_QUERIES = 1024
    cache = torch.zeros(64, 64, Fp8Latents(KV_LORA_RANK, ROPE).row_bytes, dtype=torch.uint8)
    for requests, new, heads in ((32, 1, 16), (32, 1, HEADS), (1, 1024, 16)):
        shape = requests * new, heads
        query = [torch.zeros(*shape, width, dtype=BF16) for width in (KV_LORA_RANK, ROPE)]
        table = torch.zeros(requests, 64, dtype=torch.int32)
        rows = Rows.of([new] * requests, [4096] * requests, table)
        chosen = torch.zeros(requests * new, 2048, dtype=torch.int32)
        SPARSE_BACKENDS["triton"].forward_cached(*query, cache, rows, chosen, 0.1)


def choice_over_a_cache() -> None:
    """With one new token per request, and with several; of keys that take two rounds."""
    from absorbed_mla.dsa.selection_triton import triton_select_cached
    from absorbed_mla.inference.rows import Rows

    cache = torch.zeros(8, 64, 128, dtype=BF16)
    for new, dtype in ((1, BF16), (1, FP8), (16, BF16), (16, FP8)):
        query = torch.zeros(4 * new, 64, 128, dtype=dtype)
        table = torch.zeros(4, 512, dtype=torch.int32)
        rows = Rows.of([new] * 4, [32768] * 4, table)
        triton_select_cached(query, torch.zeros(4 * new, 64), cache, rows, 2048, relu=True)


def index_kernels() -> None:
    """Scores and choice of an indexer."""
    from absorbed_mla.core_attention.masks.spans import Span, Spans
    from absorbed_mla.dsa.index_vectors import IndexVectors
    from absorbed_mla.dsa.selection_triton import triton_select

    query, key = (torch.zeros(TOKENS, 1, *s, dtype=BF16) for s in ((64, 128), (128,)))
    index = IndexVectors(query, key, torch.zeros(TOKENS, 1, 64))
    for dtype in (BF16, FP8):
        index = index._replace(query=query.to(dtype))
        triton_select(index, Spans([Span(0, TOKENS, 0, TOKENS, 0)]), 64, relu=True)


def widest_index_kernels() -> None:
    """Of the most heads and the widest rows, which leave least room."""
    from absorbed_mla.inference.rows import Rows
    from absorbed_mla.kernels.dsa.cached_scores import cached_scores, locate
    from absorbed_mla.kernels.dsa.index_scores import index_scores

    query, key = (torch.zeros(TOKENS, 1, *s, dtype=BF16) for s in ((128, 256), (256,)))
    weights = torch.zeros(TOKENS, 1, 128)
    index_scores(query, key, weights, slice(0, TOKENS), 0, TOKENS, 0, True)
    rows = Rows.of([1] * 4, [TOKENS] * 4, torch.zeros(4, TOKENS // 64, dtype=torch.int32))
    places = locate(rows.query_starts, rows.query_lengths, rows.kv_lengths, 1, 4)
    operands = query[:4, 0], weights[:4, 0], key.view(-1, 64, 256), rows.block_table, places
    cached_scores(*operands, slice(0, 4), TOKENS, True, tiles=False)


def loss_kernels() -> None:
    """Target and gradients of an indexer's loss, over visible and over chosen keys."""
    from absorbed_mla.core_attention.masks.spans import Span
    from absorbed_mla.dsa import indexer_triton
    from absorbed_mla.dsa.index_vectors import IndexVectors
    from absorbed_mla.dsa.indexer_backends.hopper import HopperHeadSum
    from absorbed_mla.dsa.key_subset import ChosenKeys, VisibleKeys
    from absorbed_mla.dsa.sparse_reference import latent_inputs

    shapes = [(HEADS, KV_LORA_RANK), (HEADS, ROPE), (KV_LORA_RANK + ROPE,)]
    *queries, kv = (torch.zeros(TOKENS, 1, *s, dtype=BF16) for s in shapes)
    inputs = latent_inputs(*queries, kv)
    lse = torch.zeros(TOKENS, 1, HEADS)
    query, key = (torch.zeros(TOKENS, 1, *s, dtype=BF16) for s in ((64, 128), (128,)))
    index = IndexVectors(query, key, torch.zeros(TOKENS, 1, 64))
    gradient = index._replace(key=key.float())
    chosen = torch.zeros(TOKENS, 1, TOKENS, dtype=torch.int32)
    for heads in (HEADS, 64):
        few = latent_inputs(*(x[:, :, :heads] for x in queries), kv)
        HopperHeadSum(few, lse[..., :heads], 0.1, lse.dtype)(
            ChosenKeys(slice(0, TOKENS), chosen, 1)
        )
    for subset in (
        VisibleKeys(Span(0, TOKENS, 0, TOKENS, 0), lse.device, 1),
        ChosenKeys(slice(0, TOKENS), chosen, 1),
    ):
        target = indexer_triton.TritonHeadSum(inputs, lse, 0.1, lse.dtype)(subset)
        indexer_triton.triton_scores(index, subset, True)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            indexer_triton.triton_add_index_gradient(gradient, target, index, subset, True)


def invariant_kernels() -> None:
    """Parity mode's products of all tiles, whole and in parts, its norm and its top-k."""
    from absorbed_mla.kernels.invariant import grouped_product, tiles
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product
    from absorbed_mla.kernels.invariant.rms_norm import rms_norm_backward, rms_norm_forward
    from absorbed_mla.kernels.invariant.row_topk import row_topk

    for tile in (*tiles.TILES, *tiles.FP32_TILES):
        dtype = torch.float32 if tile in tiles.FP32_TILES else BF16
        x, weight = torch.zeros(TOKENS, 7168, dtype=dtype), torch.zeros(1536, 7168, dtype=dtype)
        for split in (False, True):
            matrix_product(x, weight.T, tile=tile, split=split)
    x, weight = torch.zeros(TOKENS, 7168, dtype=BF16), torch.zeros(1536, 7168, dtype=BF16)
    matrix_product(x.T, x, split=False)
    # Of several parts and of one, each with all that adds code.
    matrix_product(x, weight.T, weight[:, 0].contiguous(), tile=tiles.WIDE_TILE)
    matrix_product(x.T, x, x[0], tile=tiles.WIDE_TILE)
    ends, weights = torch.zeros(256, dtype=torch.int32), torch.zeros(256, 128, 7168, dtype=BF16)
    for tile in grouped_product.TILES:
        for taken in (None, torch.zeros(TOKENS, dtype=torch.int64)):
            grouped_product.grouped_product(x, weights, ends, taken, tile=tile)
    _, scale = rms_norm_forward(x, x[0], 1e-5, False, BF16)
    rms_norm_backward(x, x, x[0], scale, False)
    for columns, k, dtype in ((32, 2, BF16), (8, 4, BF16), (256, 8, torch.float32)):
        row_topk(torch.zeros(TOKENS, columns, dtype=dtype), k, True)
    row_topk(torch.zeros(512, TOKENS, dtype=torch.float16).T, 32, False)


def norm_kernels() -> None:
    """A residual connection with its norm, and the norms and rotation of new latents."""
    from absorbed_mla.kernels.added_norm import added_norm
    from absorbed_mla.kernels.paged.new_latents import Normed, new_latents

    widths = 1536, KV_LORA_RANK + ROPE
    query, keys = torch.zeros(32, sum(widths), dtype=BF16).split(widths, dim=-1)
    weights = (torch.zeros(width, dtype=BF16) for width in (1536, KV_LORA_RANK))
    cos = torch.zeros(32, ROPE // 2)
    place = torch.zeros(32, dtype=torch.int64)
    slots = torch.zeros(8, 64, widths[1], dtype=BF16), place, place
    query, keys = (Normed(x, weight, 1e-6) for x, weight in zip((query, keys), weights))
    new_latents(query, keys, cos, cos, False, slots)
    x = torch.zeros(32, 7168, dtype=BF16)
    added_norm(x, x, x[0], 1e-6, False)


def expert_kernels() -> None:
    """Of grouped experts, at DeepSeek-V3's routing, for few tokens and many."""
    from absorbed_mla.kernels.moe.choice import choose_experts
    from absorbed_mla.kernels.moe.logits import partial_logits
    from absorbed_mla.kernels.moe.order import order_by_expert
    from absorbed_mla.kernels.moe.skinny_gemm import few_rows_product
    from absorbed_mla.kernels.moe.sums import summed
    from absorbed_mla.kernels.moe.swiglu import gated, swiglu

    logits, bias = torch.zeros(32, 256), torch.zeros(256)
    for softmax in (False, True):
        choose_experts(
            logits,
            8,
            softmax=softmax,
            bias=None if softmax else bias,
            groups=8,
            group_topk=4,
            scale=2.5,
        )
    weight = torch.zeros(256, 7168, dtype=BF16)
    for tokens in (1, 32, 256):
        parts = partial_logits(torch.zeros(tokens, 7168, dtype=BF16), weight)
    choose_experts(parts, 8, softmax=False, bias=bias, groups=8, group_topk=4, scale=2.5)
    # Of so few experts that the lanes of a warp hold copies of their scores.
    for experts, topk, groups, group_topk in ((8, 2, 2, 1), (6, 3, 2, 1), (48, 8, 3, 2)):
        parts = torch.zeros(4, 32, experts)
        routing = {"softmax": False, "bias": None, "scale": None}
        choose_experts(parts, topk, groups=groups, group_topk=group_topk, **routing)
    chosen = torch.zeros(32, 8, dtype=torch.int64)
    for tokens in (1, 1024):
        order_by_expert(torch.zeros(tokens, 8, dtype=torch.int64), 16, 0)
    _, _, places, ends = order_by_expert(chosen, 16, 0)
    weights = torch.zeros(16, 128, 256, dtype=BF16)
    for count in (8, 256, 512, 1024):
        tokens = torch.zeros(count, dtype=torch.int64)
        few_rows_product(torch.zeros(32, 256, dtype=BF16), weights, ends, tokens)
    few_rows_product(torch.zeros(1024, 256, dtype=BF16), weights, ends)
    gate_and_up = torch.zeros(256, 4096, dtype=BF16)
    for rounded in (False, True):
        of_choices = torch.zeros(32, 8), chosen.flatten(), ends
        swiglu(gate_and_up, *of_choices, rounds_each_step=rounded)
    gated(gate_and_up, rounds_each_step=True)
    for one_by_one in (False, True):
        summed(gate_and_up, places, ends, one_by_one=one_by_one)


def sampling_kernels() -> None:
    """The most likely tokens, and drawn ones, with filters and without."""
    from absorbed_mla.kernels.sampling.argmax import find_most_likely
    from absorbed_mla.kernels.sampling.draw import draw_tokens

    for dtype in (BF16, torch.float32):
        logits, numbers = torch.zeros(32, 129280, dtype=dtype), torch.zeros(6, 32).double()
        find_most_likely(logits)
        for filters in (False, True):
            draw_tokens(logits, numbers, filters=filters)


if __name__ == "__main__":
    # Compilers make many small objects that live on; looking for garbage takes longer than they.
    gc.disable()
    driver.set_active(_H200())
    JITFunction.__getitem__ = _compiled_launch
    training_kernels()
    multi_head_kernels()
    search_kernel()
    decode_kernels()
    fp8_cache_kernels()
    # Tiles of one token and of four; backward by atomics and in order: each of both once. Forward
    # with tiles of one token is compiled with decode, in splits.
    sparse_kernels("hopper", HEADS, deterministic=True, forward=False)
    sparse_kernels("hopper", 16, deterministic=False)
    sparse_kernels("triton", 16, deterministic=True)
    for kernels in ("hopper", "triton"):
        decode_of_sparse_kernels(kernels)
    sparse_fp8_kernels()
    choice_over_a_cache()
    index_kernels()
    widest_index_kernels()
    loss_kernels()
    invariant_kernels()
    norm_kernels()
    expert_kernels()
    sampling_kernels()
