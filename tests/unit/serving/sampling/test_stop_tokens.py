"""With drafts, too, a request ends at the first of its stop tokens."""

from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.sampling.stop_tokens import end_at_first_stop_token
from tests.support.engine import engine_of, prompt

GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
PROMPT = prompt(9, 3)


@pytest.fixture(scope="module")
def expected(drafting):
    """Without drafts and stop tokens."""
    [result] = engine_of(drafting).generate([PROMPT], GREEDY)
    return result


@pytest.fixture
def right_drafts(expected, monkeypatch):
    """Every draft is the token that is drawn at its position, so that all of them are accepted."""
    draw = RequestSampler._drawn

    def drawn(self, logits, rows, *, are_drafts=False):
        if not are_drafts:
            return draw(self, logits, rows)
        places = [row.position - len(PROMPT) for row in rows]
        text = [*expected.tokens, 0, 0, 0]
        return torch.tensor([text[place] for place in places], device=logits.device)

    monkeypatch.setattr(RequestSampler, "_drawn", drawn)


def stops(tokens) -> list[tuple[int, ...]]:
    """Of every two tokens that a step may add together, both orders; and each of them alone."""
    near = [pair for k in (1, 2) for pair in zip(tokens, tokens[k:])]
    return sorted({*near, *((b, a) for a, b in near), *((token,) for token in tokens)})


def test_the_first_of_several(drafting, expected, right_drafts):
    tokens = expected.tokens
    # A step of three tokens adds one of them twice.
    assert tokens[4] == tokens[5]
    cases = stops(tokens)
    engine = engine_of(drafting, num_speculative_tokens=2, max_requests=2)
    params = [GREEDY.replace(stop_token_ids=stop) for stop in cases]
    results = engine.generate([PROMPT] * len(cases), params)
    assert engine.statistics.accepted > 2 * len(cases)
    for stop, result in zip(cases, results, strict=True):
        length = 1 + min(tokens.index(token) for token in stop)
        assert (result.tokens, result.finish) == (tokens[:length], "stop"), stop
        assert result.log_probs == pytest.approx(expected.log_probs[:length], abs=1e-5)


@pytest.mark.parametrize(
    ("written", "words", "left"),
    [
        ([1, 2, 3, 4], [], None),
        ([1, 2, 3, 4], [[5]], None),
        ([1, 2, 3, 4], [[4]], [1, 2, 3, 4]),
        ([1, 2, 3, 4], [[4], [3]], [1, 2, 3]),
        ([1, 2, 3, 4], [[4], [3], [2]], [1, 2]),
        ([1, 7, 7, 7], [[7]], [1, 7]),
        ([7, 1, 7], [[1], [7]], [7]),
        ([7], [[7]], [7]),
        ([], [[7]], None),
    ],
)
def test_what_is_left(written, words, left):
    """Of the tokens of a request, the last three of which are those of a step."""
    host = SimpleNamespace(num_speculative_tokens=2)
    end_at_first_stop_token(host)
    request = SimpleNamespace(generated_tokens=list(written), stop_word_ids=words)
    found, removed = host._check_stop_words_for_request_post_append(request)
    assert found is (left is not None)
    assert request.generated_tokens == (written if left is None else left)
    assert removed == len(written) - len(request.generated_tokens)
