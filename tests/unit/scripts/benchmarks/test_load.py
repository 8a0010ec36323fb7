"""scripts/benchmarks/load.py: its clients, and its verdict on wrong tokens."""

from __future__ import annotations

import pytest

from benchmarks.engine_requests import longest
from benchmarks.load import LoadBenchmark, LoadReport, Row, latencies, missing
from benchmarks.load_requests import Outcome, Request, run, verdict, workload
from tests.support.llm import FAILING, fake_llm


def arguments(*more: str):
    return LoadBenchmark.parse(["--quick", *more])


class TestWorkload:
    def test_requests(self):
        args = arguments("--requests", "200")
        requests = workload(args, 99)
        assert requests == workload(args, 99) and longest(requests) <= 164
        prompts = [tuple(request.prompt) for request in requests]
        assert len({prompt[:66] for prompt in prompts[1::2]}) == 4
        assert min(map(len, prompts)) < 10 and max(map(max, prompts)) == 98
        params = [request.params for request in requests]
        assert 40 < sum(one.is_greedy for one in params) < 100
        assert sum(one.n == 2 for one in params) == 25
        assert len({one.seed for one in params}) == 200
        assert sum(request.abort_after is not None for request in requests) == 20
        assert any(request.pause for request in requests)


class TestRun:
    """With a fake model, whose every token is known."""

    def requests(self, number: int) -> list[Request]:
        # It fails at prompts with the first token that is left out.
        return workload(arguments("--requests", str(number)), FAILING)

    def test_every_request_ends(self):
        llm, requests = fake_llm(), self.requests(60)
        outcomes = run(llm, requests, 7)
        assert len(outcomes) == 60 and not llm.has_unfinished_requests()
        for request, outcome in zip(requests, outcomes):
            backwards = [*request.prompt[::-1]] * 99
            count = request.num_tokens
            if outcome.aborted:
                count = request.abort_after
                assert count < request.num_tokens
            expected = [backwards[index:][:count] for index in range(request.params.n)]
            assert outcome.tokens == expected
            assert 0 <= outcome.first <= outcome.whole
            assert len(outcome.gaps) == (count - 1) * request.params.n
        assert sum(outcome.aborted for outcome in outcomes) > 0

    def test_clients_wait_for_their_answers(self):
        llm, requests = fake_llm(), self.requests(12)
        most = 0
        step = llm.step

        def watched():
            nonlocal most
            most = max(most, llm.num_running)
            return step()

        llm.step = watched
        run(llm, requests, 3)
        assert most <= 2 * 3


class TestVerdict:
    REQUESTS = (None, None)
    ALONE = ([[1, 2, 3]], [[4, 5], [6, 7]])

    @pytest.mark.parametrize(
        ("first", "second", "different"),
        [
            (Outcome([[1, 2, 3]]), Outcome([[4, 5], [6, 7]]), []),
            (Outcome([[1, 2]], aborted=True), Outcome([[4], []], aborted=True), []),
            (Outcome([[1, 2]]), Outcome([[4, 5], [6, 7]]), [0]),
            (Outcome([[1, 2, 3]]), Outcome([[6, 7], [4, 5]]), [1]),
            (Outcome([[2]], aborted=True), Outcome([[4, 5, 1], []], aborted=True), [0, 1]),
        ],
    )
    def test_tokens(self, first, second, different):
        assert verdict(self.REQUESTS, [first, second], self.ALONE) == different

    def test_requests_that_never_ended(self):
        assert verdict(self.REQUESTS, [Outcome([[1, 2, 3]])], self.ALONE) == [0, 1]


class TestRow:
    @pytest.mark.parametrize(
        ("changes", "ok"),
        [
            ({}, True),
            ({"error": "RuntimeError: blocks are lost"}, False),
            ({"missing": ("eviction",)}, False),
            ({"different": (3,)}, False),
        ],
    )
    def test_ok(self, changes, ok):
        row = Row(case="parity mode", seconds=2.0, generated=10, equal=3, **changes)
        report = LoadReport({}, [row])
        assert row.ok is ok and report.as_json(row)["tokens_per_second"] == 5
        assert all(word in report.line(row) for word in changes.get("missing", ("parity",)))

    def test_missing(self):
        engine = dict.fromkeys(("prefix_blocks", "evicted", "chunks", "mixed_steps"), 0)
        assert len(missing(engine, [], 1)) == 6
        engine = dict.fromkeys(engine, 1)
        assert missing(engine, [Outcome(aborted=True)], 1) == ()

    def test_latencies(self):
        outcomes = [Outcome(first=i / 1e3, whole=i / 1e2, gaps=[1.0]) for i in range(1, 101)]
        outcomes.append(Outcome(first=0.001, whole=99.0, aborted=True))
        found = latencies(outcomes)
        assert found["first_token"] == {"p50": 50, "p99": 99, "most": 100}
        assert found["request"] == {"p50": 510, "p99": 1000, "most": 1000}
        assert found["token"]["p50"] == 1000
        assert latencies([])["token"] == {}
