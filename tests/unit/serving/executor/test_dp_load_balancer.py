"""Which rank gets which request, where each has requests of its own."""

import pytest

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.executor.commands import Abort, Add
from absorbed_mla.serving.executor.dp_load_balancer import DPLoadBalancer
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.request_results import Progress, Result
from absorbed_mla.serving.statistics import Statistics
from tests.support.llm import FakeRunner, fake_llm


class FakeRanks:
    """Runners side by side, with the commands that each has got."""

    def __init__(self, size: int, room: int = 8) -> None:
        self.runners = [FakeRunner() for _ in range(size)]
        self.sent: list[list] = [[] for _ in range(size)]
        self._room = room

    def options(self) -> EngineOptions:
        return EngineOptions(
            max_sequence_length=64,
            max_requests=self._room,
            vocab_size=257,
            scheduling_policy="priority",
        )

    def each(self, name, arguments):
        for sent, [*own] in zip(self.sent, arguments, strict=True):
            if name == "step":
                sent += own[0]
        return [getattr(one, name)(*own) for one, own in zip(self.runners, arguments)]

    def __getattr__(self, name):
        return lambda *arguments: self.each(name, [arguments] * len(self.runners))[0]


def add(length: int, tokens: int = 4, **more) -> Add:
    return Add(list(range(1, length + 1)), SamplingParams(max_tokens=tokens, **more))


def lengths(ranks: FakeRanks) -> list[list[int]]:
    return [[len(one.prompt) for one in sent if isinstance(one, Add)] for sent in ranks.sent]


@pytest.mark.parametrize(
    ("options", "prompts", "expected"),
    [
        ({}, (10, 3, 4, 5, 20), [[10, 20], [3, 4, 5]]),
        ({"room": 2}, (30, 1, 1, 1, 1), [[30, 1], [1, 1, 1]]),
    ],
    ids=["fewest tokens", "a rank with room first"],
)
def test_which_rank(options, prompts, expected):
    ranks = FakeRanks(2, **options)
    DPLoadBalancer(ranks, 2).step([add(length) for length in prompts])
    assert lengths(ranks) == expected


def test_what_was_generated_counts():
    """Two requests grow faster than one; what has ended counts no more."""
    ranks = FakeRanks(2)
    balancer = DPLoadBalancer(ranks, 2)
    balancer.step([add(6, tokens=9), add(4, tokens=9), add(1, tokens=4)])
    assert lengths(ranks) == [[6], [4, 1]]
    balancer.step([])
    balancer.step([add(2, tokens=1)])
    assert lengths(ranks) == [[6, 2], [4, 1]]
    balancer.step([])
    balancer.step([add(3)])
    assert lengths(ranks) == [[6, 2], [4, 1, 3]]


def test_progress_has_the_number_of_the_command():
    ranks = FakeRanks(3)
    balancer = DPLoadBalancer(ranks, 3)
    found = balancer.step([add(length, tokens=1) for length in (5, 4, 3, 2)])
    assert [one.number for one in found] == [0, 1, 2, 3]
    # FakeRunner's first token is the prompt's last.
    assert [one.tokens for one in found] == [[5], [4], [3], [2]]
    assert all(isinstance(one.result, Result) for one in found)
    assert [one.number for one in balancer.step([add(2, tokens=1)])] == [4]


def test_abort():
    """On the request's rank; one that has ended is no longer known."""
    ranks = FakeRanks(2)
    balancer = DPLoadBalancer(ranks, 2)
    balancer.step([add(5), add(4), add(3, tokens=1)])
    found: list[Progress] = balancer.step([Abort(1), Abort(2), Abort(77)])
    assert [(one.number, one.result.finish) for one in found if one.result] == [(1, "abort")]
    assert [one.aborted for one in ranks.runners] == [[], [0]]
    balancer.sleep()
    # Engines count anew when they wake.
    ranks.runners = [FakeRunner(), FakeRunner()]
    assert [one.number for one in balancer.step([add(2)])] == [0]


def test_seeds_do_not_depend_on_ranks():
    """A request without a seed has that of an engine alone."""
    seeds = []
    for size in (2, 3):
        ranks = FakeRanks(size)
        DPLoadBalancer(ranks, size).step([add(5), add(4, seed=7), add(3), add(2)])
        one = {len(a.prompt): a.params.seed for sent in ranks.sent for a in sent}
        seeds.append(one)
    assert seeds[0] == seeds[1]
    assert seeds[0][4] == 7 and len(set(seeds[0].values())) == 4


def test_statistics():
    of_all = Statistics.of_engines([Statistics(steps=2, most_rows=3), Statistics(5, most_rows=2)])
    assert of_all == Statistics(steps=7, most_rows=3)


def test_llm():
    """Outputs come in the order of the prompts, of which ranks know salts and priorities."""
    llm = fake_llm(DPLoadBalancer(ranks := FakeRanks(3), 3))
    prompts = ["abc", "de", "fghij", "k", "lmnopqr"]
    params = SamplingParams(max_tokens=7, n=2)
    salted = [{"prompt": text, "cache_salt": text[0]} for text in prompts]
    found = llm.generate(salted, params, use_tqdm=False, priority=[3, 1, 2, 0, 4])
    assert sorted(one for rank in ranks.runners for one in rank.priorities) == sorted(
        [*range(5)] * 2
    )
    assert sorted(salt for one in ranks.runners for salt in one.salts) == [*"aaddffkkll"]
    expected = fake_llm().generate(prompts, params.replace(n=1), use_tqdm=False)
    assert [one.prompt for one in found] == prompts
    assert [one.outputs[0].text for one in found] == [one.outputs[0].text for one in expected]


@pytest.mark.parametrize(
    "given, error",
    [
        ({"tensor_parallel_size": 1}, "needs tensor_parallel_size of at least 2, got 1"),
        ({"pipeline_parallel_size": 2}, "needs pipeline_parallel_size=1, got 2"),
        (
            {"decode_context_parallel": True},
            "data_parallel_attention needs decode_context_parallel=False or 'auto', got True",
        ),
        ({"num_speculative_tokens": 1}, "needs num_speculative_tokens=0, got 1"),
        ({"host_cache_tokens": 64}, "needs host_cache_tokens=0, got 64"),
        ({"prefix_cache_dir": "x"}, "needs prefix_cache_dir=None, got 'x'"),
        ({"parity": True}, "needs parity=False, got True"),
    ],
)
def test_refused(given, error):
    with pytest.raises(ValueError, match=error):
        LLMOptions(**{"tensor_parallel_size": 2, "data_parallel_attention": True, **given})


def test_it_needs_several_processes():
    with pytest.raises(ValueError, match="needs tensor_parallel_size of at least 2, got 1"):
        LLMOptions(data_parallel_attention=True).for_processes(None)


def test_a_live_model_has_it_or_not():
    with pytest.raises(ValueError, match="from_model has no option data_parallel_attention"):
        LLM.from_model(object(), data_parallel_attention=True)
