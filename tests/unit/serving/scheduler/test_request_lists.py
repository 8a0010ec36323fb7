"""What is taken from Megatron's lists of a request whose parts began at evictions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from absorbed_mla.serving.request_results import last_of, progress_of, result_of
from absorbed_mla.serving.sampling.parameters import SamplingParams


def part(prompt: int, generated: list[int], top: list, prompt_top: list | None = None):
    """A part of a request; its entries are named by numbers."""
    return SimpleNamespace(
        prompt_tokens=[0] * prompt,
        generated_tokens=generated,
        generated_log_probs=[float(-token) for token in generated],
        generated_top_n_logprobs=[{str(token): 0.0} for token in top],
        prompt_log_probs=None if prompt_top is None else [float(token) for token in prompt_top],
        prompt_top_n_logprobs=prompt_top and [{str(token): 0.0} for token in prompt_top],
        status=None,
    )


class Record(SimpleNamespace):
    def __getitem__(self, index):
        return self.requests[index]


# Read in chunks, whose ends left the entries 90 to 92; the second part generated nothing.
RECORD = Record(requests=[part(4, [1, 2], [90, 1, 2]), part(6, [], [91]), part(6, [3], [92, 3])])


@pytest.mark.parametrize(
    ("count", "tokens", "top"),
    [(0, [], []), (1, [3], [3]), (2, [2, 3], [2, 3]), (3, [1, 2, 3], [1, 2, 3])],
)
def test_last_entries(count, tokens, top):
    assert last_of(RECORD, "generated_tokens", count) == tokens
    found = last_of(RECORD, "generated_top_n_logprobs", count)
    assert found == [{str(token): 0.0} for token in top]
    progress = progress_of(RECORD, 7, count, None)
    assert (progress.number, progress.tokens) == (7, tokens)
    assert progress.top_log_probs == [{token: 0.0} for token in top]
    assert progress.log_probs == [-token for token in tokens]


def test_all_entries():
    result = result_of(RECORD, SamplingParams(logprobs=1), aborted=False)
    assert result.tokens == [1, 2, 3] and result.log_probs == [-1, -2, -3]
    assert result.top_log_probs == [{1: 0.0}, {2: 0.0}, {3: 0.0}]
    assert result.prompt_log_probs == result.prompt_top_log_probs == []


def test_entries_of_a_prompt():
    """Of the first part that has read it to its end; a later one's prompt is longer."""
    record = Record(
        requests=[part(4, [], [], [10]), part(4, [5], [], [10, 11, 12]), part(5, [6], [], [1] * 4)]
    )
    result = result_of(record, SamplingParams(prompt_logprobs=1), aborted=False)
    assert result.prompt_log_probs == [10, 11, 12]
    assert result.prompt_top_log_probs == [{10: 0.0}, {11: 0.0}, {12: 0.0}]
    longer = Record(requests=[part(4, [5], [], [10]), part(5, [6], [], [10, 11, 12, 13])])
    result = result_of(longer, SamplingParams(prompt_logprobs=1), aborted=False)
    assert result.prompt_log_probs == [10, 11, 12]


@pytest.mark.parametrize(
    ("asked", "top", "of_prompt"),
    [
        ({}, 0, False),
        ({"logprobs": 0}, 0, False),
        ({"logprobs": 3}, 3, False),
        ({"prompt_logprobs": 2}, 2, True),
        ({"logprobs": 3, "prompt_logprobs": 2}, 3, True),
        ({"logprobs": 1, "prompt_logprobs": 2}, 2, True),
    ],
)
def test_log_probs_that_megatron_is_asked_for(asked, top, of_prompt):
    host = SamplingParams(**asked).to_host(9)
    assert host.top_n_logprobs == top and host.return_log_probs == bool(asked)
    assert host.skip_prompt_log_probs == (not of_prompt)


@pytest.mark.parametrize(("asked", "room", "found"), [(50, 6, 6), (5, 6, 5), (None, 6, 6)])
def test_length_that_megatron_is_asked_for(asked, room, found):
    assert SamplingParams(max_tokens=asked).to_host(room).num_tokens_to_generate == found
