"""Compiles kernels for an H200 on a machine without a GPU, by the compiler that Triton brings.

A program of its own, because it replaces Triton's driver:

    python -m tests.support.hopper_compiler

It calls the launchers at DeepSeek-V3's dimensions, compiles what they launch instead of running it,
and prints a line of JSON for each kernel: its name, what memory it takes, and where Triton's cache
has it. Results are never computed, so launchers return any numbers.

What ``hopper_kernels.json`` holds is not compiled again: it knows a kernel by the key of Triton's
cache, which is that of its source, of all that it calls, its arguments and the compiler. With
``--write`` the file gets the kernels as they are.

A large kernel takes seconds. Where it has several options, each value of each is compiled, not each
combination; of an option that only adds code, the value that adds it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from absorbed_mla.core_attention.backends.hopper import ENTRY as HOPPER
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.masks.tiles import key_tiles, query_tiles
from absorbed_mla.core_attention.max_logits import MaxLogits
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.dsa import indexer_triton
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.indexer_backends.hopper import HopperHeadSum
from absorbed_mla.dsa.key_subset import ChosenKeys, VisibleKeys
from absorbed_mla.dsa.selection_triton import triton_select, triton_select_cached
from absorbed_mla.dsa.sparse_reference import latent_inputs
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.rows import Rows
from absorbed_mla.kernels import fp8_latents, operators
from absorbed_mla.kernels.added_norm import added_norm
from absorbed_mla.kernels.dsa import key_lists
from absorbed_mla.kernels.dsa.cached_scores import cached_scores, locate
from absorbed_mla.kernels.dsa.index_scores import index_scores
from absorbed_mla.kernels.invariant import grouped_product, tiles, tree_product
from absorbed_mla.kernels.invariant.matrix_product import matrix_product
from absorbed_mla.kernels.invariant.rms_norm import rms_norm_backward, rms_norm_forward
from absorbed_mla.kernels.invariant.row_topk import row_topk
from absorbed_mla.kernels.max_logits import QUERIES, largest_scores
from absorbed_mla.kernels.moe.choice import choose_experts
from absorbed_mla.kernels.moe.logits import partial_logits
from absorbed_mla.kernels.moe.order import order_by_expert
from absorbed_mla.kernels.moe.skinny_gemm import few_rows_product
from absorbed_mla.kernels.moe.sums import summed
from absorbed_mla.kernels.moe.swiglu import gated, swiglu
from absorbed_mla.kernels.paged.new_latents import Normed, new_latents
from absorbed_mla.kernels.sampling.argmax import find_most_likely
from absorbed_mla.kernels.sampling.draw import draw_tokens
from absorbed_mla.registry import SPARSE_BACKENDS
from tests.support.compiled_code import idle_barriers, reduced_across_copies

BF16, FP8, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
# Tokens and heads: tiles of whole tokens, and both sides of a causal diagonal.
TOKENS, HEADS, KV_LORA_RANK, ROPE = 256, 128, 512, 64
SPAN = Span(0, TOKENS, 0, TOKENS, 0)
# Of each kernel by its key: shared memory, stack, registers, products, as ``_assembled`` has them.
KNOWN = Path(__file__).with_name("hopper_kernels.json")
_FACTS = ("shared", "stack", "registers", "products")
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


_KNOWN: dict[str, list] = json.loads(KNOWN.read_text())
_USED: dict[str, list] = {}
_COMPILE = compiler.compile


def _compile_unknown(src, target=None, options=None, **more):
    """``triton.compiler.compile``, but for what is known."""
    backend = compiler.make_backend(target)
    parsed = backend.parse_options({**(options or {}), **src.parse_options()})
    variables = compiler.compiler.get_cache_invalidating_env_vars()
    key = compiler.get_cache_key(src, backend, parsed, env_vars=variables)
    key = hashlib.sha256(key.encode()).hexdigest()
    known = SimpleNamespace(hash=key) if key in _KNOWN else None
    return known or _COMPILE(src, target=target, options=options, **more)


def _compiled_launch(self: JITFunction, grid):
    """What ``kernel[grid]`` is here: the specialisation of these arguments is compiled."""

    def launch(*args, **kwargs):
        kernel = self.warmup(*args, grid=grid, **kwargs)
        about = {"kernel": self.fn.__name__, "fp8_rows": bool(kwargs.get("GROUP"))}
        if kernel.hash in _KNOWN:  # with neither of what fails the test
            about |= {"idle_barriers": [], "reduced_across_copies": []}
            about |= zip(_FACTS, _KNOWN[kernel.hash])
        else:
            about["cache"] = get_cache_manager(kernel.hash).cache_dir
            about |= _assembled(kernel)
        _USED[kernel.hash] = [about[name] for name in _FACTS]
        print(json.dumps(about), flush=True)

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


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def queries(*shape: int) -> list[torch.Tensor]:
    """Of the latents and of k_rope."""
    return [zeros(*shape, width) for width in (KV_LORA_RANK, ROPE)]


def paged_cache(blocks: int, fp8: bool) -> torch.Tensor:
    """Blocks of 64 latents."""
    if fp8:
        return zeros(blocks, 64, Fp8Latents(KV_LORA_RANK, ROPE).row_bytes, dtype=torch.uint8)
    return zeros(blocks, 64, KV_LORA_RANK + ROPE)


def training_kernels() -> None:
    """Forward that records the largest scores, backward that adds and that stores."""
    shapes = [(HEADS, KV_LORA_RANK), (HEADS, ROPE), (1, KV_LORA_RANK), (ROPE,)]
    inputs = AttentionInputs(*(zeros(TOKENS, 1, *s) for s in shapes), None)
    rules = ScoreRules(0.1, Spans([SPAN]))
    recorded = ScoreRules(0.1, rules.spans, max_logits=MaxLogits(torch.zeros(HEADS)))
    output = HOPPER.forward(inputs, recorded)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        HOPPER.backward(OutputGradient(output.out, None), output, inputs, rules)
    torch.use_deterministic_algorithms(False)


def multi_head_kernels() -> None:
    """Forward of the expanded form, which records the largest scores, and its backward.

    Without a window and a sink, and with both.
    """
    q, v = (zeros(TOKENS, 1, HEADS, width) for width in (192, 128))
    for window, sink in ((None, None), (100, zeros(HEADS))):
        found = query_tiles([SPAN], 128, TOKENS, window)
        out, lse, _ = operators.multi_head_attention_forward(
            q, q, v, found, 0.1, True, window, sink
        )
        found = key_tiles([SPAN], 128, TOKENS, window), 1, 0.1, window, sink
        operators.multi_head_attention_backward(out, None, out, lse, q, q, v, *found)


def search_kernel() -> None:
    """The scores again, at the widths of the expanded form."""
    q = zeros(TOKENS, 1, HEADS, 192)
    lse = torch.zeros(1, HEADS, TOKENS).permute(2, 0, 1)
    largest_scores(q, q, lse, torch.zeros(HEADS), query_tiles([SPAN], QUERIES), 0.1, 100.0)


def decode(
    kernel: str,
    requests: int,
    heads: int = HEADS,
    *,
    fp8: bool = False,
    batch_invariant: bool = False,
    prefixes: int = 0,
) -> None:
    """One new token of each request."""
    length = 8192
    cache, query = paged_cache(length // 64, fp8), queries(requests, heads)
    lists = [zeros(requests, dtype=INT32) for _ in range(3)]
    table = zeros(requests, length // 64, dtype=INT32)
    how = batch_invariant, None, prefixes
    operators.paged_attention_forward(
        *query, cache, *lists, table, 1, length, 0.1, 0, None, *how, kernel
    )


def decode_kernels() -> None:
    """Decoding over a paged cache in splits; in parity mode piece by piece, too, for many tiles."""
    for requests, batch_invariant in ((2, False), (1, True), (128, True)):
        decode("hopper", requests, batch_invariant=batch_invariant)
    decode("hopper", 4, 16, prefixes=1)


def fp8_cache_kernels() -> None:
    """Rows of an FP8 cache written and read, and decode over them by Triton and for Hopper."""
    latents, kv = Fp8Latents(KV_LORA_RANK, ROPE), zeros(64, KV_LORA_RANK + ROPE)
    rows = zeros(64, latents.row_bytes, dtype=torch.uint8)
    fp8_latents.encode(kv, *latents.parts(rows))
    fp8_latents.decode(*latents.parts(rows), kv)
    decode("triton", 128, 16, fp8=True)
    decode("hopper", 128, fp8=True)
    # Tiles of 16 rows in splits, and of 32 whole.
    decode("hopper", 2, 16, fp8=True)
    decode("hopper", 128, 32, fp8=True)
    # Piece by piece, for many tiles.
    decode("hopper", 128, fp8=True, batch_invariant=True)


def sparse_kernels(kernels: str, heads: int, deterministic: bool, forward: bool = True) -> None:
    """Sparse attention, forward and one of its backwards, or that alone."""
    # Few tokens have the tiles of many.
    key_lists._LEAST_QUERIES = 1
    sparse = SPARSE_BACKENDS[kernels]
    kv = zeros(TOKENS, 1, KV_LORA_RANK + ROPE)
    inputs = latent_inputs(*queries(TOKENS, 1, heads), kv)
    chosen = zeros(TOKENS, 1, TOKENS, dtype=INT32)
    output = AttentionOutput(inputs.q_content, torch.zeros(TOKENS, 1, heads))
    if forward:
        output = sparse.forward(inputs, chosen, 0.1)
    torch.use_deterministic_algorithms(deterministic)
    sparse.backward(OutputGradient(output.out, None), output, inputs, chosen, 0.1)


def sparse_decode(
    kernels: str, heads: int = 16, requests: int = 32, new: int = 1, fp8: bool = False
) -> None:
    """A token in each tile, its keys in splits, which are merged; or the tiles of many."""
    key_lists._LEAST_QUERIES = 1024
    cache, query = paged_cache(64, fp8), queries(requests * new, heads)
    rows = Rows.of([new] * requests, [4096] * requests, zeros(requests, 64, dtype=INT32))
    chosen = zeros(requests * new, 2048, dtype=INT32)
    SPARSE_BACKENDS[kernels].forward_cached(*query, cache, rows, chosen, 0.1)


def sparse_decode_kernels() -> None:
    """Over FP8 rows: splits of few heads, the tiles of many heads, and of several tokens."""
    for kernels in ("hopper", "triton"):
        sparse_decode(kernels)
    for requests, new, heads in ((32, 1, 16), (32, 1, HEADS), (1, 1024, 16)):
        sparse_decode("triton", heads, requests, new, fp8=True)


def choice_over_a_cache() -> None:
    """With one new token per request, and with several; of keys that take two rounds."""
    cache = zeros(8, 64, 128)
    for new, dtype in ((1, BF16), (1, FP8), (16, BF16), (16, FP8)):
        query = zeros(4 * new, 64, 128, dtype=dtype)
        rows = Rows.of([new] * 4, [32768] * 4, zeros(4, 512, dtype=INT32))
        triton_select_cached(query, torch.zeros(4 * new, 64), cache, rows, 2048, relu=True)


def index_vectors() -> IndexVectors:
    query, key = (zeros(TOKENS, 1, *s) for s in ((64, 128), (128,)))
    return IndexVectors(query, key, torch.zeros(TOKENS, 1, 64))


def index_kernels() -> None:
    """Scores and choice of an indexer."""
    index = index_vectors()
    for dtype in (BF16, FP8):
        index = index._replace(query=index.query.to(dtype))
        triton_select(index, Spans([SPAN]), 64, relu=True)


def widest_index_kernels() -> None:
    """Of the most heads and the widest rows, which leave least room."""
    query, key = (zeros(TOKENS, 1, *s) for s in ((128, 256), (256,)))
    weights = torch.zeros(TOKENS, 1, 128)
    index_scores(query, key, weights, slice(0, TOKENS), 0, TOKENS, 0, True)
    rows = Rows.of([1] * 4, [TOKENS] * 4, zeros(4, TOKENS // 64, dtype=INT32))
    places = locate(rows.query_starts, rows.query_lengths, rows.kv_lengths, 1, 4)
    operands = query[:4, 0], weights[:4, 0], key.view(-1, 64, 256), rows.block_table, places
    cached_scores(*operands, slice(0, 4), TOKENS, True, tiles=False)


def loss_kernels() -> None:
    """Target and gradients of an indexer's loss, over visible and over chosen keys."""
    heads, kv = queries(TOKENS, 1, HEADS), zeros(TOKENS, 1, KV_LORA_RANK + ROPE)
    lse, index = torch.zeros(TOKENS, 1, HEADS), index_vectors()
    gradient = index._replace(key=index.key.float())
    chosen = ChosenKeys(slice(0, TOKENS), zeros(TOKENS, 1, TOKENS, dtype=INT32), 1)
    for count in (HEADS, 64):
        few = latent_inputs(*(x[:, :, :count] for x in heads), kv)
        HopperHeadSum(few, lse[..., :count], 0.1, lse.dtype)(chosen)
    for subset in (VisibleKeys(SPAN, lse.device, 1), chosen):
        inputs = latent_inputs(*heads, kv)
        target = indexer_triton.TritonHeadSum(inputs, lse, 0.1, lse.dtype)(subset)
        indexer_triton.triton_scores(index, subset, True)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            indexer_triton.triton_add_index_gradient(gradient, target, index, subset, True)


def invariant_kernels() -> None:
    """Parity mode's products of all tiles, whole and in parts, its norm and its top-k."""
    for tile in (*tiles.TILES, *tiles.FP32_TILES):
        dtype = torch.float32 if tile in tiles.FP32_TILES else BF16
        x, weight = zeros(TOKENS, 7168, dtype=dtype), zeros(1536, 7168, dtype=dtype)
        for split in (False, True):
            matrix_product(x, weight.T, tile=tile, split=split)
    x, weight = zeros(TOKENS, 7168), zeros(1536, 7168)
    matrix_product(x.T, x, split=False)
    # Of several parts and of one, each with all that adds code.
    matrix_product(x, weight.T, weight[:, 0].contiguous(), tile=tiles.WIDE_TILE)
    matrix_product(x.T, x, x[0], tile=tiles.WIDE_TILE)
    # A tree in one program of each tile, in several, and of many rows, in memory, too.
    for tile in tree_product.TILES:
        tree_product.tree_product(x, weight.T, 8, tile=tile, subtrees=1)
    tree_product.tree_product(x, weight.T, 16, 2, torch.float32, subtrees=4)
    tree_product.tree_product(x, weight.T, 8, tile=tree_product.WIDE_TILE)
    tree_product.tree_product(x, weight.T, 16, 2, torch.float32, tile=tree_product.WIDE_TILE)
    ends, weights = zeros(256, dtype=INT32), zeros(256, 128, 7168)
    for tile in grouped_product.TILES:
        for taken in (None, zeros(TOKENS, dtype=torch.int64)):
            grouped_product.grouped_product(x, weights, ends, taken, tile=tile)
    for tile in grouped_product.TREE_TILES:
        grouped_product.grouped_product(x, weights, ends, tile=tile, leaves=8)
    _, scale = rms_norm_forward(x, x[0], 1e-5, False, BF16)
    rms_norm_backward(x, x, x[0], scale, False)
    for columns, k, dtype in ((32, 2, BF16), (8, 4, BF16), (256, 8, torch.float32)):
        row_topk(zeros(TOKENS, columns, dtype=dtype), k, True)
    row_topk(zeros(512, TOKENS, dtype=torch.float16).T, 32, False)


def norm_kernels() -> None:
    """A residual connection with its norm, and the norms and rotation of new latents."""
    widths = 1536, KV_LORA_RANK + ROPE
    query, keys = zeros(32, sum(widths)).split(widths, dim=-1)
    weights = (zeros(width) for width in (1536, KV_LORA_RANK))
    cos, place = torch.zeros(32, ROPE // 2), zeros(32, dtype=torch.int64)
    query, keys = (Normed(x, weight, 1e-6) for x, weight in zip((query, keys), weights))
    new_latents(query, keys, cos, cos, False, (zeros(8, 64, widths[1]), place, place))
    x = zeros(32, 7168)
    added_norm(x, x, x[0], 1e-6, False)


def expert_kernels() -> None:
    """Of grouped experts, at DeepSeek-V3's routing, for few tokens and many."""
    logits, bias = torch.zeros(32, 256), torch.zeros(256)
    routing = {"groups": 8, "group_topk": 4, "scale": 2.5}
    for softmax in (False, True):
        choose_experts(logits, 8, softmax=softmax, bias=None if softmax else bias, **routing)
    weight = zeros(256, 7168)
    for tokens in (1, 32, 256):
        parts = partial_logits(zeros(tokens, 7168), weight)
    choose_experts(parts, 8, softmax=False, bias=bias, **routing)
    # Of so few experts that the lanes of a warp hold copies of their scores.
    for experts, topk, groups, group_topk in ((8, 2, 2, 1), (6, 3, 2, 1), (48, 8, 3, 2)):
        routing = {"groups": groups, "group_topk": group_topk, "scale": None}
        choose_experts(torch.zeros(4, 32, experts), topk, softmax=False, bias=None, **routing)
    for tokens in (1, 1024):
        order_by_expert(zeros(tokens, 8, dtype=torch.int64), 16, 0)
    chosen = zeros(32, 8, dtype=torch.int64)
    _, _, places, ends = order_by_expert(chosen, 16, 0)
    weights = zeros(16, 128, 256)
    for count in (8, 256, 512, 1024):
        few_rows_product(zeros(32, 256), weights, ends, zeros(count, dtype=torch.int64))
    few_rows_product(zeros(1024, 256), weights, ends)
    gate_and_up, of_choices = zeros(256, 4096), (torch.zeros(32, 8), chosen.flatten(), ends)
    for rounded in (False, True):
        swiglu(gate_and_up, *of_choices, rounds_each_step=rounded)
    gated(gate_and_up, rounds_each_step=True)
    for one_by_one in (False, True):
        summed(gate_and_up, places, ends, one_by_one=one_by_one)


def sampling_kernels() -> None:
    """The most likely tokens, and drawn ones, with filters and without."""
    for dtype in (BF16, torch.float32):
        logits, numbers = zeros(32, 129280, dtype=dtype), zeros(6, 32, dtype=torch.float64)
        find_most_likely(logits)
        for filters in (False, True):
            draw_tokens(logits, numbers, filters=filters)


if __name__ == "__main__":
    # Compilers make many small objects that live on; looking for garbage takes longer than they.
    gc.disable()
    driver.set_active(_H200())
    compiler.compile = _compile_unknown
    JITFunction.__getitem__ = _compiled_launch
    torch.mm = lambda a, b: a.new_empty(len(a), b.shape[1])  # five seconds for what nothing reads
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
    sparse_decode_kernels()
    choice_over_a_cache()
    index_kernels()
    widest_index_kernels()
    loss_kernels()
    invariant_kernels()
    norm_kernels()
    expert_kernels()
    sampling_kernels()
    if "--write" in sys.argv:
        rows = (f"{json.dumps(key)}: {json.dumps(_USED[key])}" for key in sorted(_USED))
        KNOWN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
