"""tests/support/compiled_code.py, which judges what the compiler makes of kernels."""

import pytest

from tests.support.compiled_code import idle_barriers, reduced_across_copies

TWO = "!ttg.memdesc<2x1xi64, #shared, #smem, mutable>"
ONE = "!ttg.memdesc<1xi64, #shared, #smem, mutable>"
# Two pairs of barriers, of which a role has the second.
BARRIERS = f"""
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
    assert idle_barriers(BARRIERS.replace("USE", use)) == ["%barriers"]


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
    assert idle_barriers(BARRIERS.replace("USE", use)) == []


def test_code_of_another_compiler():
    """Barriers that are not found would all seem to be used."""
    with pytest.raises(AssertionError, match="written otherwise"):
        idle_barriers(BARRIERS.replace("local_alloc", "allocate"))


BLOCKED = "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [1]}>"
REDUCTIONS = f"""
#blocked = {BLOCKED}
#linear = #ttg.linear<{{register = [], lane = LANES, warp = [], block = []}}>
      %one = "tt.reduce"(%0) <{{axis = 0 : i32}}> ({{
      ^bb0(%a: f32 loc(#loc), %b: f32 loc(#loc)):
        %c = arith.maxnumf %a, %b : f32 loc(#loc)
        tt.reduce.return %c : f32 loc(#loc)
      }}) : (tensor<8xf32, #blocked>) -> f32 loc(#loc)
      %two = "tt.reduce"(%1) <{{axis = AXIS : i32}}> ({{
      ^bb0(%a: f32 loc(#loc), %b: f32 loc(#loc)):
        %c = arith.addf %a, %b : f32 loc(#loc)
        tt.reduce.return %c : f32 loc(#loc)
      }}) : (tensor<8xf32, #linear>) -> f32 loc(#loc)
"""


@pytest.mark.parametrize(
    ("lanes", "axis", "wrong"),
    [
        ("[[1], [2], [0], [0], [4]]", 0, True),  # eight numbers, on an H100: other experts
        ("[[1], [2], [4], [0], [0]]", 0, False),
        ("[[0], [0], [1], [2], [4]]", 0, False),
        ("[[0], [0], [0], [0], [0]]", 0, False),
        ("[[0, 1], [0, 2], [1, 0], [2, 0], [0, 0]]", 1, False),
        ("[[0, 1], [0, 0], [0, 2], [1, 0], [2, 0]]", 1, True),
    ],
)
def test_lanes(lanes, axis, wrong):
    code = REDUCTIONS.replace("LANES", lanes).replace("AXIS", str(axis))
    assert reduced_across_copies(code) == ["%two"] * wrong
