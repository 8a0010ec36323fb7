"""Whether a request has the tokens that it has alone, and if not, whether two were as likely.

Products of matrices are rounded in another way in a batch of another size. In bfloat16 that decides
between tokens of nearly the same probability, and every later token is then another one. A whole
forward over the tokens before says how near they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel

from engine_benchmark.workload import Request

# Of log-probabilities between tokens of which either may be chosen.
TIES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass
class Comparison:
    """Of all requests, together and alone.

    Attributes:
        equal: Requests with the same tokens.
        ties: Requests that part where both tokens are within the tie of the likeliest.
        different: The other requests.
        worst_gap: Furthest that a chosen token was from the likeliest, in log-probability.
        examples: Numbers of some of the different ones.
    """

    equal: int = 0
    ties: int = 0
    different: int = 0
    worst_gap: float = 0.0
    examples: tuple[int, ...] = ()


def compare(
    model: GPTModel,
    requests: Sequence[Request],
    together: Sequence[Sequence[int]],
    alone: Sequence[Sequence[int]],
    tie: float,
) -> Comparison:
    """Compare the tokens of every request.

    Args:
        model: That generated both.
        requests: Their prompts.
        together: Tokens by request.
        alone: Likewise.
        tie: Log-probability by which a chosen token may be below the likeliest.
    """
    found = Comparison()
    for number, (request, batched, single) in enumerate(zip(requests, together, alone)):
        if list(batched) == list(single):
            found.equal += 1
            continue
        gap = _gap(model, request, batched, single)
        found.worst_gap = max(found.worst_gap, gap)
        if gap <= tie:
            found.ties += 1
        else:
            found.different += 1
            found.examples = (*found.examples, number)[:8]
    return found


@torch.inference_mode()
def _gap(model: GPTModel, request: Request, batched: Sequence[int], single: Sequence[int]) -> float:
    """How far the less likely of the first two different tokens is below the likeliest."""
    if len(batched) != len(single):
        return float("inf")
    at = next(i for i, (one, other) in enumerate(zip(batched, single)) if one != other)
    device = next(model.parameters()).device
    ids = torch.tensor([[*request.prompt, *batched[:at]]], device=device)
    positions = torch.arange(ids.shape[1], device=device)[None]
    was_active = InferenceMode.is_active()
    # A forward without a context is no inference to Megatron.
    InferenceMode.unset_active()
    scores = model(ids, positions, None)[0, -1].float().log_softmax(-1)
    if was_active:
        InferenceMode.set_active()
    return float(scores.max() - scores[[batched[at], single[at]]].min())
