"""What Triton's compiler makes of the Hopper kernels, which it does without a GPU, too.

Their results are tested by emulation (test_paged_hopper.py) and on GPUs; this finds what only the
compiler sees: code that it refuses, shared memory that there is not, registers that do not suffice,
barriers whose memory it gives to others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.launched_kernels import launched_kernels

pytest.importorskip("triton.experimental.gluon")
pytestmark = [pytest.mark.no_cover, pytest.mark.skipif(needs.HAS_GPU, reason="a GPU runs them")]
pytestmark += [pytest.mark.usefixtures("forked_python")]
# Bytes of shared memory that a program of an H200 may have.
LIMIT = 232448
# Seconds after which a compiled kernel that no run has used is removed.
UNUSED = 14 * 24 * 3600
# Kernels in Triton that the program does not launch.
OTHERS = {"_broadcast_kernel", "_gather_kernel", "_head_product_kernel", "_rotate_kernel"}
OTHERS |= {"_weights_kernel", "key_kernel", "query_kernel"}
KINDS = {
    "attend_multi_head": 2,  # without a window and a sink, and with both
    "attend_multi_head_backward": 2,
    "attend_few_rows": 2,  # of 16 rows in splits, of 32 whole
    "attend_sparse_forward": 2,  # of four tokens, and of one in splits
    "attend_sparse_backward": 2,  # by atomics and in order
    "sum_sparse_probabilities": 2,  # of one group of heads and of two
    "_scores_kernel": 4,  # in bf16, in FP8, and others, like the next two
    "_token_kernel": 3,
    "_tile_kernel": 2,
    "_chosen_kernel": 4,  # target, scores, and two gradients
    "_topk_kernel": 4,  # of DeepSeek-V3's router, and of the widest rows
    "_swiglu_kernel": 3,  # rounded once, and as PyTorch with and without probs
}
# Bytes of a thread's stack, at most; where a kernel is not here its registers suffice.
STACK = {
    # Two numbers wait on the stack from tile to tile, none from block to block.
    "attend_multi_head": 8,
    # Two programs share the registers of a multiprocessor.
    "_paged_kernel": 128,
    # A few addresses wait on the stack from tile to tile: the warps that decode have 112 registers.
    "attend_fp8_decode": 48,
    # So do a few addresses; more would leave its products no registers, and the compiler would wait
    # for each.
    "attend_multi_head_backward": 64,
    # Over FP8 rows in tiles of 64 rows numbers wait on the stack, of one token and of four.
    "_forward_kernel": 640,
    # Some numbers of few rows wait on the stack from tile to tile, and where splits are combined.
    "attend_few_rows": 16,
    "_combine_kernel": 16,
    # A few addresses of pieces of keys do, from tile to tile.
    "attend_decode_pieces": 48,
    # And some numbers from piece to piece, where the warps that decode have their registers.
    "attend_fp8_decode_pieces": 96,
    # A few numbers of the product of many rows do, where a part's sums are added and a bias is.
    "multiply_rows": 32,
    # Where sums of eight leaves wait in memory, their addresses do on the stack.
    "multiply_leaves": 272,
}
# The instructions of products: tiles that had them of two kinds would not have the same bits.
WARP_GROUP = ["wgmma.mma_async"]
PRODUCTS = {
    "_product_kernel": 10 * [WARP_GROUP] + 4 * [[]] + [WARP_GROUP],  # fp32 has none
    "_grouped_kernel": 8 * [WARP_GROUP],  # of three tiles, of rows and of taken ones; of leaves
    "multiply_rows": 2 * [WARP_GROUP],
    "multiply_leaves": 2 * [WARP_GROUP],
    "_tree_product_kernel": 3 * [WARP_GROUP],
}


def run(program: str, cache: Path) -> str:
    """What a program of tests/support prints that compiles kernels into a folder."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", f"tests.support.{program}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def kernel_cache() -> Path:
    """Where Triton finds what it has compiled for any checkout's run, and the file does not hold.

    It is found by the source of a kernel and of all that it calls, its arguments, and the compiler.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "absorbed_mla" / "hopper_kernels"


def test_kernels():
    kernel_cache().mkdir(parents=True, exist_ok=True)  # nothing is compiled where all are known
    kernels = [json.loads(line) for line in run("hopper_compiler", kernel_cache()).splitlines()]
    for kernel in kernels:
        if "cache" in kernel:
            os.utime(kernel["cache"])
    for folder in kernel_cache().iterdir():
        if time.time() - folder.stat().st_mtime > UNUSED:  # of former sources
            shutil.rmtree(folder)
    kinds: dict[str, list[dict]] = {}
    for kernel in kernels:
        kinds.setdefault(kernel["kernel"], []).append(kernel)
    assert {name.rpartition(".")[2] for name in launched_kernels()} - {*kinds} == OTHERS
    assert {name: len(kinds[name]) for name in KINDS} == KINDS
    assert {name: [k["products"] for k in kinds[name]] for name in PRODUCTS} == PRODUCTS
    assert [k for k in kernels if k["stack"] > STACK.get(k["kernel"], 0)] == [], "registers spill"
    # Those in tiles of few heads have registers for all, as have those that are not over FP8 rows.
    sparse = [k["stack"] for k in kinds["_forward_kernel"] if k["fp8_rows"]]
    assert sum(k["stack"] > 0 for k in kinds["_forward_kernel"]) == 2 and sparse[0] == 0
    assert kinds["multiply_rows"][1]["stack"] == 0, "of one part"
    assert kinds["multiply_leaves"][0]["stack"] == 0, "of eight leaves"
    for name in ("attend_multi_head", "attend_multi_head_backward"):
        assert len({kernel["stack"] for kernel in kinds[name]}) == 1, (
            "a window or a sink takes registers"
        )
    [fp8] = kinds["_paged_kernel"]
    assert 2 * fp8["shared"] <= LIMIT and fp8["registers"] <= 128
    assert max(kernel["shared"] for kernel in kernels) <= LIMIT
    assert [k for k in kernels if k["idle_barriers"]] == [], "their memory is not theirs alone"
    reduced = [k for k in kernels if k["reduced_across_copies"]]
    assert reduced == [], "Triton 3.6 reduces copies, too"


def test_traffic_compiles_nothing(tmp_path):
    """Kernels are the same for any number of requests and tokens: none is compiled amid traffic."""
    variants = json.loads(run("kernel_variants", tmp_path))
    several = {
        "_schedule_kernel": 4,  # of two kinds of caches; of few and of many requests
        "_combine_kernel": 2,
        "_gather_kernel": 2,
        "_grouped_kernel": 2,  # of few rows of an expert, and of many
        "_order_kernel": 5,  # up to 64, 256 and more choices, of which a token has one or several
    }
    assert {name: variants.pop(name) for name in several} == several
    assert {"attend_decode", "attend_few_rows", "_merge_kernel"} <= {*variants}
    assert {*variants.values()} == {1}, variants
