"""tests/support/reduced_lanes.py, which judges what the compiler makes of reductions."""

from __future__ import annotations

import pytest

from tests.support.reduced_lanes import reduced_across_copies

BLOCKED = "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [1]}>"
CODE = f"""
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
    code = CODE.replace("LANES", lanes).replace("AXIS", str(axis))
    assert reduced_across_copies(code) == ["%two"] * wrong
