"""The token of each request with penalties, by the sampler that an engine calls.

A token is right as in ``sampling.py``. The most likely one is right if no other token's logit,
with penalties, is larger by more than rounding.
"""

from __future__ import annotations

from itertools import product as combinations
from typing import NamedTuple

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.families.sampling import may_be_drawn
from checks.fuzz.family import Family

# Of fp32's products and sums.
_TIE = 1e-6


class Config(NamedTuple):
    """Size of the vocabulary and dtype of the logits."""

    vocabulary: int
    dtype: torch.dtype


def _config(draw: Draw) -> Config:
    vocabulary = draw.choice(2, 100, 32000, draw.integer(2, 20000))
    return Config(min(vocabulary, draw.limit(130000, 300)), draw.choice(BF16, FP16, FP32))


def _params(draw: Draw, vocabulary: int):
    from absorbed_mla.serving.sampling.parameters import SamplingParams

    stops = [draw.integer(0, vocabulary - 1) for _ in range(draw.choice(0, 0, 2))]
    return SamplingParams(
        temperature=draw.choice(0.0, 1.0, 0.7),
        top_k=draw.choice(0, 0, draw.integer(1, vocabulary)),
        top_p=draw.choice(1.0, 0.9),
        min_p=draw.choice(0.0, 0.05),
        repetition_penalty=draw.choice(1.0, 1.3, 0.8),
        presence_penalty=draw.choice(0.0, 0.5, -0.5),
        frequency_penalty=draw.choice(0.0, 0.25, -0.1),
        min_tokens=draw.choice(0, 5),
        stop_token_ids=tuple(dict.fromkeys(stops)),
    )


def _penalised(logits: Tensor, params, prompt: list[int], output: list[int]) -> Tensor:
    """fp64 [vocabulary], token by token."""
    logits = logits.double().clone()
    if len(output) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -torch.inf
    for token in {*prompt, *output}:
        greater = logits[token] > 0
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if greater else logits[token] * factor
    for token in output:
        logits[token] -= params.frequency_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
    return logits


def _run(config: Config, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.serving.sampling import sampler

    rows = draw.integer(1, draw.limit(16, 4))
    logits = draw.normal(rows, config.vocabulary, dtype=config.dtype, magnitude=3.0)
    requests, wanted, numbers = [], [], []
    for row in range(rows):
        prompt, generated, drafts = (
            [draw.integer(0, config.vocabulary - 1) for _ in range(draw.integer(least, 40))]
            for least in (1, 0, 0)
        )
        drafts = drafts[: draw.choice(0, 0, 3)]
        params = _params(draw, config.vocabulary)
        request = sampler.SampledRequest(params, draw.integer(0, 2**60), prompt, generated)
        position = len(prompt) + len(generated) + len(drafts)
        requests.append(sampler._Row(request, position, drafts))
        wanted.append(_penalised(logits[row], params, prompt, [*generated, *drafts]))
        numbers.append(sampler.draw_numbers(request, position, config.vocabulary))
    found = sampler.draw(logits, requests)
    wide, table = torch.stack(wanted), draw.integer_tensor(numbers, torch.float64).T
    best = wide.amax(-1)
    own = wide.gather(-1, found[:, None])[:, 0]
    right = (table[5] == 0) & (best - own <= _TIE * best.abs())
    for signs in combinations((-1, 1), repeat=2):
        right |= (table[5] > 0) & may_be_drawn(wide, table, found, *signs)
    compare.holds("tokens", ~right, found, wide.argmax(-1))


FAMILIES = (Family("penalties", (), _config, _run, share=0.3),)
