"""tests/support/idle_barriers.py, which judges what the compiler makes of the Hopper kernels."""

from __future__ import annotations

import pytest

from tests.support.idle_barriers import idle_barriers

TWO = "!ttg.memdesc<2x1xi64, #shared, #smem, mutable>"
ONE = "!ttg.memdesc<1xi64, #shared, #smem, mutable>"
# Two pairs of barriers, of which a role has the second.
CODE = f"""
      %numbers = ttg.local_alloc : () -> !ttg.memdesc<5x64xf32, #shared, #smem, mutable> loc(#loc)
      %barriers = ttg.local_alloc : () -> {TWO} loc(#loc1)
      %first = ttg.memdesc_index %barriers[%c0_i32] : {TWO} -> {ONE} loc(#loc2)
      ttng.init_barrier %first, 1 : {ONE} loc(#loc3)
      %barriers_1 = ttg.local_alloc : () -> {TWO} loc(#loc1)
      %first_1 = ttg.memdesc_index %barriers_1[%c0_i32] : {TWO} -> {ONE} loc(#loc2)
      ttng.init_barrier %first_1, 1 : {ONE} loc(#loc3)
      USE
      ttg.warp_specialize(%out, %barriers_1) attributes {{requestedRegisters = array<i32: 24>}}
      default {{
        ttg.warp_yield loc(#loc)
      }}
      partition0(%arg0: !tt.ptr<i32> loc(unknown), %arg1: {TWO} loc(unknown)) num_warps(4) {{
        %barriers = ttg.memdesc_index %arg1[%c0_i32] : {TWO} -> {ONE} loc(#loc2)
        ttng.arrive_barrier %barriers, 1, %true : {ONE} loc(#loc4)
        ttg.warp_return loc(#loc)
      }} : (!tt.ptr<i32>, {TWO}) -> () loc(#loc)
"""


@pytest.mark.parametrize(
    "use",
    [
        f"%taken = ttg.memdesc_index %barriers[%c1_i32] : {TWO} -> {ONE} loc(#loc2)",
        f"ttng.init_barrier %first, 2 : {ONE} loc(#loc3)",
        f"%barriers_2 = ttg.memdesc_index %barriers_1[%first_2] : {TWO} -> {ONE} loc(#loc2)",
    ],
    ids=["a_view", "set_up_twice", "of_others"],
)
def test_set_up_alone(use):
    """In a role the same name is that of something else."""
    assert idle_barriers(CODE.replace("USE", use)) == ["%barriers"]


@pytest.mark.parametrize(
    "use",
    [
        f"ttng.wait_barrier %first, %12, %true : {ONE} loc(#loc4)",
        f"ttng.arrive_barrier %first, 1, %true : {ONE} loc(#loc4)",
        "ttg.warp_specialize(%out, %barriers) attributes {}",
        f"%x, %y = scf.if %true -> ({ONE}, i32) {{ scf.yield %first, %c0_i32 }}",
    ],
    ids=["waited_for", "passed", "of_a_role", "as_a_value"],
)
def test_used(use):
    assert idle_barriers(CODE.replace("USE", use)) == []


def test_code_of_another_compiler():
    """Barriers that are not found would all seem to be used."""
    with pytest.raises(AssertionError, match="written otherwise"):
        idle_barriers(CODE.replace("local_alloc", "allocate"))
