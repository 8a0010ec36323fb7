"""Parity mode with tensor_parallel_parts: over all ranks the bits of one rank.

Ranks of 2, 4 and 8 processes are compared with one each, so all of them are equal.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from absorbed_mla.batch_invariant import batch_invariant_mode, parts
from absorbed_mla.batch_invariant.gradients import require_complete_gradients
from absorbed_mla.shared_prefix_log_probs import shared_prefix_log_probs
from tests.distributed.whole import on_one_rank, whole_tensors
from tests.support import needs, world
from tests.support.cases import TINY
from tests.support.models import whole_logits
from tests.support.parity import LAYERS, TREE, cached, parity_model, tokens_of

# On a GPU the kernels have no fp32, and bits of gradients are not promised.
pytestmark = [needs.processes(2, 4, 8), needs.no_gpu]

PARTS = 8
# A prompt in two chunks, tokens decoded behind each.
SIZES = [7, 1, 7, 1]
WIDTHS = {
    "dense": {**LAYERS["dense"], "ffn_hidden_size": 48},
    "mixed": {**LAYERS["mixed"], "ffn_hidden_size": 48, "moe_ffn_hidden_size": 24},
}
# Layers, dtype, sequence parallelism, other fields.
CASES = {
    "mixed-fp32-sp": ("mixed", torch.float32, True, {}),
    "dense-bf16-sp": ("dense", torch.bfloat16, True, {"mtp": True}),
    "dense-fp32": ("dense", torch.float32, False, {"q_lora_rank": None}),
    "mixed-bf16-sp": (
        "mixed",
        torch.bfloat16,
        True,
        {
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
            "gate": "elementwise",
            "k_rope_norm": True,
        },
    ),
}


def results(tp: int, layers: str, dtype: torch.dtype, sequence_parallel: bool, more) -> dict:
    """Logits, losses and gradients of two backward passes, over all ranks, by name."""
    own = {name: value for name, value in more.items() if hasattr(TINY, name)}
    model = parity_model(
        dtype,
        mla=replace(TINY, heads=PARTS, **own),
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        **WIDTHS[layers],
        **{name: value for name, value in more.items() if name not in own},
    )
    tokens = tokens_of(2, sum(SIZES))
    found = {"logits": whole_logits(model.train(), tokens).detach()}
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    for shift in (1, 2):
        loss = model(tokens, positions, None, labels=tokens.roll(-shift, 1))
        loss.mean().backward()
        found[f"loss {shift}"] = loss.detach()
    shared = shared_prefix_log_probs(model, TREE, tokens_of(1, TREE.num_tokens)[0])
    shared.sum().backward()
    found["shared prefixes"] = shared.detach()
    if parts.fixed.count:  # Megatron calls it before an optimizer's step
        require_complete_gradients([model], model.config)
    found |= whole_tensors((name, _gradient(p)) for name, p in model.named_parameters())
    if not more.get("mtp"):
        found["cached"] = cached(model, tokens, SIZES)
        assert torch.equal(found["cached"], found["logits"])
    return found


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Marked as its parameter is."""
    assert parameter.grad is not None
    for mark in ("tensor_model_parallel", "partition_dim"):
        setattr(parameter.grad, mark, getattr(parameter, mark, None))
    return parameter.grad


def differences(*case) -> list[str]:
    """Names of what has other bits over all ranks than on one."""
    with world.parallel(tp=1):
        expected = on_one_rank(lambda: results(1, *case))
    found = results(world.size(), *case)
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


# Four ranks have a case that two have not: they take longer, and have nothing else.
@pytest.mark.parametrize("name", [*CASES][1:] if world.size() == 2 else [*CASES][:1])
def test_bits_of_one_rank(name):
    with batch_invariant_mode(tensor_parallel_parts=PARTS):
        assert differences(*CASES[name]) == []


@needs.processes(2)
def test_other_bits_without_parts():
    """The comparison can fail: a rank's summands are rounded before they are added."""
    with batch_invariant_mode():
        assert {"logits", "loss 1"} <= {*differences(*CASES["mixed-bf16-sp"])}
