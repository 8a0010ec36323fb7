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
from pathlib import Path

import pytest

from tests.support import needs

pytest.importorskip("triton.experimental.gluon")
# Bytes of shared memory that a program of an H200 may have.
LIMIT = 232448


@pytest.fixture
def kernel_cache(pytestconfig, tmp_path) -> Path:
    """Where Triton finds what it has compiled for a former run: some minutes of a core.

    It is found by the source of a kernel and of all that it calls, its arguments, and the compiler.
    """
    cache = getattr(pytestconfig, "cache", None)  # absent under -p no:cacheprovider
    return cache.mkdir("hopper_kernels") if cache else tmp_path


def forget_others(cache: Path, used: set[str]) -> None:
    """Remove kernels of former sources."""
    for folder in cache.iterdir():
        if str(folder) not in used:
            shutil.rmtree(folder)


@pytest.mark.no_cover
@pytest.mark.skipif(needs.HAS_GPU, reason="a GPU runs them")
def test_kernels(kernel_cache):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kernel_cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.hopper_compiler"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    forget_others(kernel_cache, {kernel.pop("cache") for kernel in kernels})
    names = [kernel["kernel"] for kernel in kernels]
    assert "attend_forward" in names
    # Two numbers wait on the stack from tile to tile, none from block to block.
    [multi_head] = [kernel for kernel in kernels if kernel["kernel"] == "attend_multi_head"]
    assert multi_head["stack"] <= 8
    assert {"attend_backward", "attend_backward_stored"} <= {*names}
    assert names.count("attend_few_rows") == 2, "of 16 rows in splits, of 32 whole"
    assert {"attend_decode", "_combine_kernel", "_largest_kernel"} <= {*names}
    assert names.count("attend_sparse_forward") == 2, "of four tokens, and of one in splits"
    assert names.count("attend_sparse_backward") == 2, "by atomics and in order"
    assert names.count("sum_sparse_probabilities") == 2, "of one group of heads and of two"
    assert {"_scores_kernel", "_select_kernel", "_visible_kernel", "_gradient_kernel"} <= {*names}
    assert {"_token_kernel", "_tile_kernel", "_slots_kernel", "_merge_kernel", "_sum_kernel"} <= {
        *names
    }
    for name, count in {"_scores_kernel": 4, "_token_kernel": 3, "_tile_kernel": 2}.items():
        assert names.count(name) == count, f"{name} in bf16, in FP8, and others"
    assert names.count("_chosen_kernel") == 4, "target, scores, and two gradients"
    # Tiles whose instructions were of two kinds would not have the same bits.
    products = [kernel["products"] for kernel in kernels if kernel["kernel"] == "_product_kernel"]
    assert products == 10 * [["wgmma.mma_async"]] + 4 * [[]] + [["wgmma.mma_async"]], (
        "fp32 has none"
    )
    grouped = [kernel["products"] for kernel in kernels if kernel["kernel"] == "_grouped_kernel"]
    assert grouped == 6 * [["wgmma.mma_async"]], "of three tiles, of rows and of taken ones"
    assert names.count("_topk_kernel") == 4, "of DeepSeek-V3's router, and of the widest rows"
    # Two programs of decode over FP8 rows share the registers of a multiprocessor.
    [fp8] = [kernel for kernel in kernels if kernel["kernel"] == "_paged_kernel"]
    assert 2 * fp8["shared"] <= LIMIT and fp8["registers"] <= 128 and fp8["stack"] <= 128
    assert {"_encode_kernel", "_decode_kernel"} <= {*names}
    assert {"_choice_kernel", "_order_kernel", "_sums_kernel"} <= {*names}
    assert names.count("_swiglu_kernel") == 3, "rounded once, and as PyTorch with and without probs"
    assert {"_block_argmax_kernel", "_softmax_weights_kernel", "_inverse_cdf_kernel"} <= {*names}
    # A few addresses wait on the stack from tile to tile: the warps that decode have 112 registers.
    [decode] = [kernel for kernel in kernels if kernel["kernel"] == "attend_fp8_decode"]
    assert decode["stack"] <= 48
    # So do a few addresses of the multi-head backward; more would leave its products no registers,
    # and the compiler would wait for each.
    [backward] = [k for k in kernels if k["kernel"] == "attend_multi_head_backward"]
    assert backward["stack"] <= 64
    # In tiles of 64 rows numbers wait on the stack, of one token and of four.
    sparse = [k for k in kernels if k["kernel"] == "_forward_kernel" and k["fp8_rows"]]
    assert [k["stack"] <= most for k, most in zip(sparse, (0, 640, 640), strict=True)] == [True] * 3
    # Some numbers of few rows wait on the stack from tile to tile, and where splits are combined.
    few = [k for k in kernels if k["kernel"] in ("attend_few_rows", "_combine_kernel")]
    assert max(k["stack"] for k in few) <= 16
    # A few addresses of pieces of keys do, from tile to tile.
    [pieces] = [kernel for kernel in kernels if kernel["kernel"] == "attend_decode_pieces"]
    assert pieces["stack"] <= 48
    # And some numbers from piece to piece, where the warps that decode have their registers.
    [fp8_pieces] = [kernel for kernel in kernels if kernel["kernel"] == "attend_fp8_decode_pieces"]
    assert fp8_pieces["stack"] <= 96
    # A few numbers of the product of many rows do, where a part's sums are added and a bias is.
    wide = [kernel for kernel in kernels if kernel["kernel"] == "multiply_rows"]
    several, one = (kernel["stack"] for kernel in wide)
    assert several <= 32 and one == 0
    assert [kernel["products"] for kernel in wide] == 2 * [["wgmma.mma_async"]]
    known = (fp8, decode, backward, *sparse, multi_head, *few, pieces, fp8_pieces, *wide)
    others = (kernel for kernel in kernels if kernel not in known)
    assert [kernel for kernel in others if kernel["stack"]] == [], "registers are spilled"
    assert max(kernel["shared"] for kernel in kernels) <= LIMIT
    idle = [(kernel["kernel"], kernel["idle_barriers"]) for kernel in kernels]
    assert [each for each in idle if each[1]] == [], "their memory is not theirs alone"
    reduced = [(kernel["kernel"], kernel["reduced_across_copies"]) for kernel in kernels]
    assert [each for each in reduced if each[1]] == [], "Triton 3.6 reduces copies, too"


@pytest.mark.no_cover
@pytest.mark.skipif(needs.HAS_GPU, reason="it replaces Triton's driver")
def test_traffic_compiles_nothing(tmp_path):
    """Kernels are the same for any number of requests and tokens: none is compiled amid traffic."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.kernel_variants"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    variants = json.loads(done.stdout)
    # Of two kinds of caches; the schedule of few and of many requests.
    assert variants.pop("_schedule_kernel") == 4
    assert variants.pop("_combine_kernel") == variants.pop("_gather_kernel") == 2
    # Of few rows of an expert, and of many.
    assert variants.pop("_grouped_kernel") == 2
    # Up to 64, 256 and more choices, of which a token has one or several.
    assert variants.pop("_order_kernel") == 5
    assert {"attend_decode", "attend_few_rows", "_merge_kernel"} <= {*variants}
    assert {*variants.values()} == {1}, variants
