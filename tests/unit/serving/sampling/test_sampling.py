"""Sampling parameters: what they refuse, and the distributions and tokens that they give."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.serving.sampling.device_sampler import (
    SampledRequest,
    draw_by_numbers,
    most_likely,
    weigh,
)
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.sampling.sampler import RequestSampler, _Row, draw
from tests.support import world
from tests.support.combinations import grid
from tests.support.drawing import drawn, table_of
from tests.support.engine import CHUNKED, KEPT, engine_of, generating_model, prompt

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5])
DRAWS = 5_000
# Of a share estimated from that many draws: five standard deviations.
TOLERANCE = 5 * 0.5 / DRAWS**0.5


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, or None, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens must be at most max_tokens 2, got 3"),
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"temperature": None}, "temperature must be at least 0"),
        ({"top_k": -2}, "top_k must be an integer"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 0.001 to 1000"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be from 0.001 to 1000"),
        ({"presence_penalty": 3}, "presence_penalty must be from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty must be from -2 to 2"),
        ({"logit_bias": {3: 101}}, "logit_bias must be token ids with numbers from -100 to 100"),
        ({"logit_bias": {-1: 1}}, "logit_bias must be token ids with"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias must be token ids with"),
        ({"logit_bias": [3]}, "logit_bias must be token ids with"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be token ids, 1 to 16384, or None"),
        ({"allowed_token_ids": [1] * 16385}, "allowed_token_ids must be token ids, 1 to 16384"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "from -100 to 100, at most 1024"),
        ({"bad_words": ["a"] * 257}, "at most 256 of 4096 characters or tokens together"),
        ({"bad_words": ["a", [1] * 4096]}, "at most 256 of 4096 characters or tokens together"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids must be token ids"),
        ({"bad_words": ["a", ""]}, "bad_words must be texts or lists of token ids, none of them"),
        ({"bad_words": [[]]}, "bad_words must be texts or lists"),
        ({"bad_words": [3]}, "bad_words must be texts or lists"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be an integer of at least 1"),
        ({"n": 0}, "n must be an integer of at least 1"),
        ({"seed": 2**63}, "seed must be an integer of 64 bits"),
        ({"stop": ["a", ""]}, "stop must be a string or several, none of them empty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids must be token ids"),
        ({"logprobs": 101}, "logprobs must be an integer from 0 to 100, or None, got 101"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be an integer from 0 to 100, or None, got"),
    ],
)
def test_refused(changes, error):
    with pytest.raises(ValueError, match=error):
        SamplingParams(**changes)


def test_values_without_names():
    """vLLM's first one is n."""
    with pytest.raises(ValueError, match=r"takes its fields by their names, .* got 0.8 without"):
        SamplingParams(0.8)
    params = SamplingParams(temperature=0.8)
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params


def row(position=0, *, generated=(), tokens=(), drafts=(), seed=0, **params) -> _Row:
    """A row whose token is ``position`` places after those that are known."""
    request = SampledRequest(SamplingParams(**params), seed, list(tokens), list(generated))
    return _Row(request, position + len(tokens) + len(generated), drafts)


def shares(logits=LOGITS, **params) -> torch.Tensor:
    """How often each token is drawn."""
    first = row(**params)
    rows = [_Row(first.request, first.position + i, first.drafts) for i in range(DRAWS)]
    tokens = draw(logits.expand(DRAWS, -1), rows)
    return torch.bincount(tokens, minlength=len(logits)) / DRAWS


def filtered(probabilities: torch.Tensor, kept: list[int]) -> torch.Tensor:
    chosen = torch.zeros_like(probabilities)
    chosen[kept] = probabilities[kept]
    return chosen / chosen.sum()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [0, 5, 1]),
        ({"top_k": 10**30}, [0, 1, 2, 3, 4, 5]),
        # Shares by rank: 0.43, 0.26, 0.16, 0.10, 0.06, 0.02.
        ({"top_p": 0.6}, [0, 5]),
        ({"top_p": 0.75}, [0, 5, 1]),
        # Of the three of top_k, two have 0.81.
        ({"top_k": 3, "top_p": 0.8}, [0, 5]),
        ({"min_p": 0.3}, [0, 5, 1]),
        ({"min_p": 0.3, "temperature": 2.0}, [0, 5, 1, 2, 3]),
    ],
)
def test_distribution(params, kept):
    expected = (LOGITS.double() / params.get("temperature", 1.0)).softmax(-1)
    assert (shares(**params) - filtered(expected, kept)).abs().max() < TOLERANCE


def test_seeds():
    """Over seeds, the numbers of one position are as independent as over positions."""
    tokens = draw(LOGITS.expand(DRAWS, -1), [row(seed=seed) for seed in range(DRAWS)])
    found = torch.bincount(tokens, minlength=len(LOGITS)) / DRAWS
    assert (found - LOGITS.softmax(-1)).abs().max() < TOLERANCE


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e40, 1e300])
def test_temperatures_beyond_float32(temperature):
    """With tokens that are excluded: minus infinity stays what it is."""
    logits = torch.tensor([0.0, 3.0, -torch.inf, 1.0])
    found = shares(logits, temperature=temperature)
    if temperature < 1:
        assert found[1] == 1
    else:
        assert found[2] == 0 and (found[[0, 1, 3]] - 1 / 3).abs().max() < TOLERANCE


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_greedy(params):
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert shares(logits, **params)[1] == 1, "of equal ones the first"


def reference_penalties(logits, tokens, output, repetition, presence, frequency):
    """As the definitions say, token by token."""
    result = logits.clone()
    for token in range(len(logits)):
        if token in tokens or token in output:
            result[token] *= repetition if result[token] <= 0 else 1 / repetition
        if token in output:
            result[token] -= frequency * output.count(token) + presence
    return result


@pytest.mark.parametrize("penalties", [(1.3, 0.7, 0.4), (0.8, -0.5, 0.3)])
def test_penalties(penalties):
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    history = {"tokens": [4, 1], "generated": [0, 5, 5], "drafts": (0,)}
    expected = reference_penalties(LOGITS, [4, 1], [0, 5, 5, 0], *penalties).softmax(-1)
    found = shares(**history, **dict(zip(names, penalties)))
    assert (found - expected).abs().max() < TOLERANCE


def reference_biases(logits, output, logit_bias, allowed, words):
    """As the definitions say, token by token."""
    result = logits.clone()
    for token in range(len(logits)):
        result[token] += logit_bias.get(token, 0)
        bad = any(
            word[-1] == token and output[len(output) - len(word) + 1 :] == word[:-1]
            for word in words
            if len(word) <= len(output) + 1
        )
        if token not in allowed or bad:
            result[token] = -torch.inf
    return result


WORDS = [[], [[5], [0, 1]], [[2, 0, 3], [1, 3], [3, 2, 0, 1, 1, 2]]]
BIASES = [{}, {0: -2.0, 3: 1.5, 4: 0.5}]


@grid(2, {"allowed": [None, [1, 3, 5, 2]], "logit_bias": BIASES, "words": WORDS})
def test_biases(allowed, logit_bias, words):
    """Behind [.., 2, 0]: of the words the first, the last, or none of its tokens come before."""
    history = {"tokens": [4, 0, 1], "generated": [5, 2], "drafts": (0,)}
    params = {"logit_bias": logit_bias, "allowed_token_ids": allowed, "bad_words": words}
    ids = range(6) if allowed is None else allowed
    biased = reference_biases(LOGITS, [5, 2, 0], logit_bias, ids, words)
    assert (shares(**history, **params) - biased.softmax(-1)).abs().max() < TOLERANCE
    penalised = reference_penalties(biased, [4, 0, 1], [5, 2, 0], 1.3, 0.7, 0.4)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    found = shares(**history, **params, **dict(zip(names, (1.3, 0.7, 0.4))))
    assert (found - penalised.softmax(-1)).abs().max() < TOLERANCE, "before penalties"
    greedy = draw(LOGITS[None], [row(**history, **params, temperature=0)])
    assert greedy.item() == biased.argmax()


def test_tokens_that_stop_are_not_drawn_before_min_tokens():
    params = {"tokens": [1, 1], "stop_token_ids": [0, 99], "min_tokens": 3, "temperature": 0}
    tokens = draw(LOGITS.expand(5, -1), [row(position, **params) for position in range(5)])
    assert tokens.tolist() == [5, 5, 5, 0, 0]


def test_tokens_of_the_prompt_are_not_drawn():
    """Where a chunk ends inside of it, and after an eviction inside of what was generated."""
    request = SampledRequest(SamplingParams(), 0, [3, 4], [5])
    tokens = draw(LOGITS.expand(3, -1), [_Row(request, position) for position in range(3)])
    assert tokens.tolist() == [3, 4, 5]


def test_the_batch_does_not_matter():
    """Rows with every kind of parameter, alone and in any order."""
    kinds = [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0},
        {"frequency_penalty": 0.5, "generated": [1, 2]},
        {"top_k": 9, "top_p": 0.9, "temperature": 1.7},
        {"logit_bias": {5: 3.0, 1000: 9.0}, "bad_words": [[5], [2, 7]], "generated": [2]},
        {"allowed_token_ids": range(9, 80), "frequency_penalty": 0.5, "generated": [30]},
    ]
    torch.manual_seed(0)
    # A width that is no multiple of a vector register's, for exp at the end of a tensor.
    rows = [row(7 * i, seed=i, **kinds[i % len(kinds)]) for i in range(56)]
    logits = torch.randn(len(rows), 1013)
    alone = torch.cat([draw(one[None], [owner]) for one, owner in zip(logits, rows)])
    order = torch.randperm(len(rows))
    together = draw(logits[order], [rows[i] for i in order])
    assert torch.equal(together, alone[order])


def test_logits_are_not_changed():
    logits = LOGITS.expand(2, -1).clone()
    draw(logits, [row(frequency_penalty=1.0, generated=[0]), row(min_tokens=9, stop_token_ids=[1])])
    assert torch.equal(logits, LOGITS.expand(2, -1))


@pytest.mark.parametrize("vocabulary", [1, 5, 1013])
@pytest.mark.parametrize("coarse", [False, True])
def test_tokens_are_those_of_the_definition(vocabulary, coarse):
    """Token by token, with exact sums; ``coarse``: most logits are equal to others."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(48, vocabulary, generator=generator) * 3
    logits[torch.rand(48, vocabulary, generator=generator) < 0.2] = -torch.inf
    logits[:, vocabulary // 2] = 1.0
    if coarse:
        logits = logits.round()
    random = torch.rand(48, dtype=torch.float64, generator=generator).tolist()
    random[:6], random[6:12] = [0.0] * 6, [1 - 2.0**-53] * 6
    kinds = [
        {},
        {"top_k": 3},
        {"top_p": 0.7, "temperature": 1.5},
        {"min_p": 0.1},
        {"top_k": 400, "top_p": 0.95, "min_p": 0.001, "temperature": 3.0},
        {"sampled": 0},
    ]
    rows = [{**kinds[i % 6], "random": value} for i, value in enumerate(random)]
    numbers = table_of(rows, vocabulary)
    expected = [drawn(*row) for row in zip(logits, weigh(logits, numbers), numbers.t())]
    assert draw_by_numbers(logits, numbers, filters=True).tolist() == expected


def test_filters_that_leave_all_change_nothing():
    """Also where their row is drawn with others that have filters."""
    torch.manual_seed(0)
    logits = torch.randn(9, 1013)
    plain = draw(logits, [row(seed=i) for i in range(9)])
    wide = {"top_k": 1012, "top_p": 1 - 2.0**-53}
    rows = [row(seed=i, **(wide if i % 3 else {})) for i in range(9)]
    assert torch.equal(draw(logits, rows), plain)


@pytest.mark.parametrize("filters", [False, True])
def test_rows_without_a_token(filters):
    """The largest logit is NaN or infinite; the others are not affected."""
    logits = torch.randn(6, 300)
    logits[0], logits[1, [5, 7]], logits[2, ::2] = torch.nan, torch.nan, torch.inf
    logits[3], logits[4] = -torch.inf, torch.inf
    rows = [{"top_k": 7, "top_p": 0.5, "random": 0.99}, {"sampled": 0}]
    for kind in rows:
        found = draw_by_numbers(logits, table_of([kind] * 6, 300), filters=filters).tolist()
        assert found[:5] == [-1] * 5 and 0 <= found[5] < 300
    assert most_likely(logits).tolist() == [*[-1] * 5, logits[5].argmax()]


def test_exact_ties_at_top_p_and_min_p():
    """Tokens with exactly that part of the sum are enough; one with exactly that share is left."""
    logits = torch.full((6, 40), -torch.inf)
    logits[:, [3, 9, 20, 30]] = 2.0
    last = {"random": 1 - 2.0**-53}
    parts = (0.25, 0.5, 0.75, 0.25 + 2.0**-40, 0.5 + 2.0**-40, 1 - 2.0**-53)
    numbers = table_of([{"top_p": part, **last} for part in parts], 40)
    assert draw_by_numbers(logits, numbers, filters=True).tolist() == [3, 9, 20, 9, 20, 30]
    numbers = table_of([{"min_p": 1.0, **last}] * 6, 40)
    assert draw_by_numbers(logits, numbers, filters=False).tolist() == [30] * 6


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 0.5}, {"bad_words": [[7, 0, 0], [0, 1, 0], [0, 1, 1]]}]
)
def test_the_drafts_before_a_token_count(params):
    """A step verifies them together, each place after other tokens."""
    sampler = RequestSampler(2)
    params = SamplingParams(temperature=0, **params)
    sampler.requests[5] = SampledRequest(params, 0, [9, 8], [7], number=5)
    table = {"request_ids": 5, "request_kv_length_offsets": 2, "request_query_lengths": 3}
    context = SimpleNamespace(
        paused_request_count=0,
        total_request_count=1,
        gpu_view=SimpleNamespace(token_to_input_ids=torch.tensor([7, 0, 1])),
        **{name: torch.tensor([value]) for name, value in table.items()},
    )
    # Tokens 0, 1 and 2 lie less apart than a penalty.
    logits = torch.tensor([0.9, 0.8, 0.7, 0, 0, 0, 0, 0, 0, 0]).repeat(3, 1)
    assert sampler.sample_speculative(logits, 1, 0, 2, context).tolist() == [0, 1, 2]


class TestInTheEngine:
    """With Megatron's scheduler, which says what each row is."""

    @pytest.fixture(scope="class")
    def drafting(self):
        return generating_model(num_layers=1, mtp_num_layers=1)

    PROMPTS = tuple(prompt(length, seed) for seed, length in enumerate((5, 70, 33, 64, 9, 20)))
    PARAMS = tuple(
        SamplingParams(max_tokens=12, seed=i, **params)
        for i, params in enumerate(
            [
                {"temperature": 1.5},
                {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.3},
                {"top_k": 20, "top_p": 0.9, "presence_penalty": 1.0},
                {"min_p": 0.1, "temperature": 2.0},
                {"logit_bias": {3: 2.0, 9: -3.0}, "bad_words": [[3, 3], [9]], "temperature": 0.9},
                {"allowed_token_ids": [1, 4, 7, 8, 20], "bad_words": [[4, 4], [1]]},
            ]
        )
    )

    def tokens(self, engine, prompts=PROMPTS, params=PARAMS):
        return [result.tokens for result in engine.generate(prompts, params)]

    @pytest.mark.parametrize(
        "options",
        [CHUNKED, {"blocks": 5}, {"prefix_caching": True}],
        ids=["chunked", "evicted", "prefix"],
    )
    def test_alone_or_together(self, model, options):
        """Positions are those of the sequence, whatever happened to the request."""
        alone = [
            self.tokens(engine_of(model), [one], [params])[0]
            for one, params in zip(self.PROMPTS, self.PARAMS)
        ]
        assert self.tokens(engine_of(model, **options)) == alone
        assert len(set(map(tuple, alone))) == 6

    def test_drafts_change_nothing(self, drafting):
        """Also not under sampling, penalties or a stop token in the middle of accepted drafts."""
        plain = self.tokens(engine_of(drafting))
        engine = engine_of(drafting, num_speculative_tokens=1)
        assert self.tokens(engine) == plain
        assert engine.statistics.accepted
        for i, tokens in enumerate(plain):
            for stop in tokens[2:8:3]:
                params = self.PARAMS[i].replace(stop_token_ids=[stop])
                [result] = engine.generate([self.PROMPTS[i]], params)
                assert result.tokens == tokens[: tokens.index(stop) + 1]
                assert result.finish == "stop"

    @pytest.mark.parametrize("options", [{}, CHUNKED, KEPT], ids=["plain", "chunked", "prefix"])
    def test_log_probs(self, model, options):
        """Of generated tokens and of the prompt, before penalties, with the most likely ones."""
        params = SamplingParams(
            max_tokens=4, temperature=0, frequency_penalty=2.0, logprobs=3, prompt_logprobs=3
        )
        engine = engine_of(model, prompt_logprobs=True, **options)
        with engine:
            # A first request leaves its blocks in the prefix cache.
            engine.generate(self.PROMPTS[1:2], params)
            [result] = engine.generate(self.PROMPTS[1:2], params)
        text = torch.tensor([self.PROMPTS[1] + result.tokens], device=world.device())
        with torch.no_grad():
            logits = model(text, torch.arange(text.shape[1], device=text.device)[None], None)[0]
        expected = logits.log_softmax(-1)[:-1]
        found = torch.tensor(result.prompt_log_probs + result.log_probs)
        own = expected.gather(-1, text[0, 1:, None]).squeeze(-1)
        torch.testing.assert_close(found, own.cpu(), atol=5e-5, rtol=0)
        top = expected.topk(3)
        tops = result.prompt_top_log_probs + result.top_log_probs
        assert [list(one) for one in tops] == top.indices.tolist()
        values = torch.tensor([list(one.values()) for one in tops])
        torch.testing.assert_close(values, top.values.cpu(), atol=5e-5, rtol=0)
