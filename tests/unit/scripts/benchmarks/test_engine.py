"""scripts/benchmarks/engine.py: its verdict on an engine that is wrong, and its requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.serving.request_results import Result
from absorbed_mla.serving.statistics import Statistics
from benchmarks.engine import EngineBenchmark, EngineCase, EngineReport, Row, errors, missing, tie
from benchmarks.engine_requests import (
    Comparison,
    Request,
    compare,
    longest,
    scarce_blocks,
    workload,
)
from tests.support.engine import by_whole_forwards, generating_model, prompt


def arguments(*more: str):
    return EngineBenchmark.parse(["--quick", *more])


class TestComparison:
    REQUESTS = (Request(prompt(20), 6), Request(prompt(9), 6))

    @pytest.fixture(scope="class")
    def model(self):
        return generating_model().eval()

    @pytest.fixture(scope="class")
    def alone(self, model):
        return [result.tokens for result in by_whole_forwards(model, self.REQUESTS)]

    def test_the_same(self, model, alone):
        assert compare(model, self.REQUESTS, alone, alone, 0.1) == Comparison(equal=2)

    def test_another_token(self, model, alone):
        wrong = [alone[0], [*alone[1][:3], alone[1][3] ^ 1, *alone[1][4:]]]
        found = compare(model, self.REQUESTS, wrong, alone, 1e-3)
        assert (found.equal, found.ties, found.different, found.examples) == (1, 0, 1, (1,))
        assert found.worst_gap > 1e-3
        # As wide as the gap, it is a tie.
        tied = compare(model, self.REQUESTS, wrong, alone, found.worst_gap)
        assert (tied.equal, tied.ties, tied.different) == (1, 1, 0)

    def test_tokens_that_are_missing(self, model, alone):
        found = compare(model, self.REQUESTS, [alone[0], alone[1][:-1]], alone, 100.0)
        assert found.different == 1


@pytest.mark.parametrize(
    ("flags", "dtype", "expected"),
    [
        ([], torch.bfloat16, 0.1),
        ([], torch.float32, 1e-3),
        (["--batch-invariant"], torch.bfloat16, 0.0),
    ],
)
def test_what_is_a_tie(flags, dtype, expected):
    assert tie(arguments(*flags), dtype) == expected


class TestRow:
    CASE = EngineCase("ours", graphs=True)
    RUN = Statistics(steps=9, graph_steps=3, mixed_steps=2, chunks=1, prefix_blocks=1)

    @pytest.mark.parametrize(
        ("changes", "ok"),
        [
            ({}, True),
            ({"error": "TypeError: no"}, False),
            ({"missing": ("preemption",)}, False),
            ({"comparison": Comparison(equal=2, ties=3)}, True),
            ({"comparison": Comparison(equal=2, different=1)}, False),
        ],
    )
    def test_ok(self, changes, ok):
        row = Row(case=self.CASE, seconds=2.0, generated=10, **changes)
        found = EngineReport({}, [row])
        assert row.ok is ok and found.as_json(row)["ok"] is ok
        assert row.tokens_per_second == 5
        assert all(word in found.line(row) for word in changes.get("missing", ("ours",)))

    def test_missing(self):
        assert missing(self.RUN, self.CASE) == ("preemption",)
        idle = Statistics()
        assert len(missing(idle, self.CASE)) == 5
        assert "graph steps" not in missing(idle, EngineCase("ours", graphs=False))

    def test_errors(self):
        assert errors([Result([1])]) == ""
        assert errors([Result(error="BlockOverflowError")]) == "request 0: BlockOverflowError"


class TestWorkload:
    def test_requests(self):
        args = arguments("--requests", "100")
        requests = workload(args)
        assert requests == workload(args) and len(requests) == 100
        lengths = [len(request.prompt) for request in requests]
        assert max(lengths) <= 160 and min(lengths) < 20 and longest(requests) <= 200
        shared = [tuple(request.prompt[:70]) for request in requests[1::2]]
        assert len(set(shared)) == 4
        assert {1, 40} <= {request.num_tokens for request in requests}

    def test_too_few_blocks(self):
        """For eight of three blocks each, but enough for any one of them."""
        requests = [Request(prompt(120), 40)] * 20
        assert scarce_blocks(requests, 8) == 10
        assert scarce_blocks(requests[:1], 8) == 6


def test_cases():
    def cases(*more: str) -> list:
        return EngineBenchmark.cases(SimpleNamespace(args=arguments(*more)))

    found = cases("--implementations", "ours")
    assert [str(case) for case in found] == ["ours, eager", "ours, CUDA graphs"]
    assert len(cases("--num-cuda-graphs", "0")) == 2
