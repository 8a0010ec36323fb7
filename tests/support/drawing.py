"""Drawing tokens as the definition says, token by token."""

import numpy as np
import torch
from torch import Tensor

# Of a row that has no filters, and takes the first token with a weight.
PLAIN = {
    "temperature": 1.0,
    "random": 0.0,
    "min_p": 0.0,
    "top_k": 2**20,
    "top_p": 1.0,
    "sampled": 1,
}


def table_of(rows: list[dict], vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """The numbers of rows, each those of ``PLAIN`` with changes, float64 [6, rows]."""
    found = [{**PLAIN, **row} for row in rows]
    for row in found:
        row["top_k"] = min(row["top_k"], vocabulary)
    return torch.tensor([list(row.values()) for row in found], dtype=torch.float64).t().to(device)


def kept(logits: Tensor, weights: Tensor, top_k: int, top_p: float) -> list[int]:
    """The tokens of a row that its filters leave, the most likely one first."""
    number = np.arange(len(logits))
    order = np.lexsort((number, -logits.float().cpu().numpy()))[:top_k]
    values = [int(weights[token]) for token in order]
    total, before, found = sum(values), 0, []
    for token, value in zip(order.tolist(), values):
        if not value or before >= top_p * total:
            break
        found.append(token)
        before += value
    return found


def drawn(logits: Tensor, weights: Tensor, numbers: Tensor) -> int:
    """The token of a row, by exact sums."""
    _, random, _, top_k, top_p, sampled = numbers.tolist()
    if not sampled:
        return int(logits.float().argmax())
    left = sorted(kept(logits, weights, int(top_k), top_p))
    target = int(random * sum(int(weights[token]) for token in left))
    for token in left:
        target -= int(weights[token])
        if target < 0:
            return token
    raise AssertionError("no token")
