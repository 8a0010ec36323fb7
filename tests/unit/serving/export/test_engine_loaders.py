"""Live weights as vLLM's and SGLang's weight updates take them, by readers of our own.

They are written from public interfaces: vLLM's ``vllm/distributed/weight_transfer``, which packs
tensors by what it was told of them, and SGLang's ``Engine.update_weights_from_tensor``, whose
DeepSeek models join two projections within a call (sgl-project/sglang pull request 38298).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from absorbed_mla.export import LiveWeights, weight_buckets
from tests.unit.serving.export.test_hf_weights import OPTIONS, assert_equal, made

JOINED = ("q_a_proj", "kv_a_proj_with_mqa")
LIMIT = 10_000
Pairs = Iterable[tuple[str, Tensor]]


def packed(pairs: Pairs) -> Iterator[Tensor]:
    """Bytes of the tensors one behind the other, up to the one with which they exceed the limit."""
    parts: list[Tensor] = []
    for _, tensor in pairs:
        parts.append(tensor.view(torch.uint8).view(-1))
        if sum(map(len, parts)) > LIMIT:
            yield torch.cat(parts)
            parts = []
    if parts:
        yield torch.cat(parts)


def unpacked(buffers: Iterator[Tensor], told: Mapping[str, list]) -> Iterator[tuple[str, Tensor]]:
    """Views of buffers whose sizes the reader knows by itself."""
    buffer, start = torch.empty(0, dtype=torch.uint8), 0
    for name, dtype_name, shape in zip(told["names"], told["dtype_names"], told["shapes"]):
        if start == len(buffer):
            buffer, start = next(buffers), 0
        dtype = getattr(torch, dtype_name)
        end = start + math.prod(shape) * dtype.itemsize
        # Without a copy, which a start that the dtype does not divide would need.
        yield name, buffer[start:end].view(dtype).view(shape)
        start = end
    assert start == len(buffer) and next(buffers, None) is None


def joined(calls: Iterable[Pairs]) -> dict[str, Tensor]:
    """Parameters after calls of a loader that forgets at the end of each what it could not join."""
    found: dict[str, Tensor] = {}
    for pairs in calls:
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in pairs:
            module = name.split(".")[-2]
            if module not in JOINED:
                found[name] = tensor
                continue
            whole = name.replace(module, "fused_qkv_a_proj_with_mqa")
            own = halves.setdefault(whole, {})
            own[module] = tensor
            if len(own) == len(JOINED):
                found[whole] = torch.cat([own[one] for one in JOINED])
    return found


@pytest.mark.parametrize("asked", ["plain", "fp8_ue8m0"])
def test_packed_transfer(asked):
    """Told before: names, dtypes and shapes, as JSON has them."""
    weights = LiveWeights(made(), **OPTIONS[asked][1])
    names, dtypes, shapes = zip(*weights.shapes)
    told = {"names": names, "dtype_names": [str(x).split(".")[-1] for x in dtypes]}
    told = json.loads(json.dumps({**told, "shapes": shapes}))
    assert_equal(dict(unpacked(packed(weights), told)), dict(weights))


@pytest.mark.parametrize("asked", ["plain", "fp8_ue8m0"])
def test_buckets(asked):
    """No two that must be joined are apart; each is within the limit, or one attention."""
    weights = LiveWeights(made(), **OPTIONS[asked][1])
    buckets = list(weight_buckets(weights, LIMIT))
    assert_equal(dict(pair for bucket in buckets for pair in bucket), dict(weights))
    whole = joined([weights])
    assert_equal(joined(buckets), whole)
    # One by one some are lost, and this reader sees it.
    lost = whole.keys() - joined([pair] for pair in weights).keys()
    assert {name.split(".")[-2] for name in lost} == {"fused_qkv_a_proj_with_mqa"}
    for bucket in buckets:
        layers = {name.partition(".self_attn.")[0] for name, _ in bucket}
        assert sum(tensor.nbytes for _, tensor in bucket) <= LIMIT or len(layers) == 1
    assert len(buckets) < len(weights.shapes) / 2
