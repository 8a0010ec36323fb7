"""Counts how many kernels Triton would compile for batches of many sizes, on a machine without GPU.

A program of its own, because it replaces Triton's driver:

    python -m tests.support.kernel_variants

It calls the launchers of an engine's steps for many numbers of requests and tokens, at widths of
DeepSeek-V3, and compiles nothing. Its output is JSON: the number of variants by kernel.
"""

from __future__ import annotations

import json
from collections import defaultdict

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.kernels import broadcast_k_rope, merging, operators, rotation
from absorbed_mla.kernels.invariant import grouped_product
from absorbed_mla.kernels.moe import choice, order, sums, swiglu
from absorbed_mla.kernels.paged import gather, plan
from tests.support.hopper_compiler import _H200, BF16, KV_LORA_RANK, ROPE

NUMBERS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 71, 127, 128, 129, 200)
# Heads of a rank, TP 16, of which tiles are short, and the experts' choices of a token.
HEADS, TOPK, EXPERTS = 8, 6, 16
_variants: dict[str, set[str]] = defaultdict(set)


def _launch(self: JITFunction, grid):
    """What ``kernel[grid]`` is here: a note of what would be compiled."""

    def launch(*args, **kwargs):
        # Triton's own way to a compiled kernel, which is looked for under this.
        binder = self.device_caches[0][-1]
        _, specialization, _ = binder(*args, **{"debug": False, **kwargs})
        options = sorted((name, str(value)) for name, value in kwargs.items())
        _variants[self.fn.__name__].add(str((specialization, options)))

    return launch


def decode(requests: int, first: int, fp8: bool) -> None:
    """One new token of each request, which are neighbouring rows from ``first`` on."""
    rows, length = requests + first, 2**14
    width = Fp8Latents(KV_LORA_RANK, ROPE).row_bytes if fp8 else KV_LORA_RANK + ROPE
    cache = torch.zeros(64, 64, width, dtype=torch.uint8 if fp8 else BF16)
    lists = [torch.zeros(rows, dtype=torch.int32)[first:] for _ in range(3)]
    # Rows of the table begin at any address.
    table = torch.zeros(rows, 21, dtype=torch.int32)[first:]
    query = [torch.zeros(rows, HEADS, w, dtype=BF16)[first:] for w in (KV_LORA_RANK, ROPE)]
    operators.paged_attention_forward(
        *query, cache, *lists, table, 1, length, 0.1, 0, None, False, kernel="hopper"
    )
    gather.gather(cache, table[0], 0, requests, cache.new_zeros(requests, width))


def prefill(tokens: int) -> None:
    """What tokens take beside attention and products."""
    out, lse = torch.zeros(tokens, 1, HEADS, 128), torch.zeros(tokens, 1, HEADS)
    merging.merge(out, lse, out, lse)
    k_rope, keys = torch.zeros(tokens, ROPE, dtype=BF16), torch.zeros(tokens, HEADS, 192)
    broadcast_k_rope.broadcast_k_rope(k_rope, keys.to(BF16))
    angles = torch.zeros(tokens, ROPE // 2)
    rotation.rotate(torch.zeros(tokens, 1, HEADS, 192, dtype=BF16), angles, angles, False)
    scores = torch.zeros(tokens, EXPERTS)
    more = {"bias": None, "groups": None, "group_topk": None, "scale": 2.5}
    choice.choose_experts(scores, TOPK, softmax=False, **more)
    for topk in (1, TOPK):
        order.order_by_expert(torch.zeros(tokens, topk, dtype=torch.int64), EXPERTS, 0)
    rows, ends = torch.zeros(tokens * TOPK, 64), torch.zeros(EXPERTS, dtype=torch.int32)
    grouped_product.grouped_product(rows.to(BF16), torch.zeros(EXPERTS, 4096, 64, dtype=BF16), ends)
    sums.summed(rows, torch.zeros(tokens, TOPK, dtype=torch.int64), ends)
    swiglu.gated(rows)


def main() -> None:
    driver.set_active(_H200())
    JITFunction.__getitem__ = _launch
    plan.processors = lambda device: 132
    for number in NUMBERS:
        for first in (0, 1):
            for fp8 in (False, True):
                decode(number, first, fp8)
        prefill(number)
    print(json.dumps({name: len(found) for name, found in sorted(_variants.items())}))


if __name__ == "__main__":
    main()
