"""Training on the experts that a rollout's tokens were routed to."""

import numpy as np
import pytest
import torch

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.router_replay import (
    decoder_routers,
    replay_routed_experts,
    training_routed_experts,
)
from tests.support import world
from tests.support.cases import INTERPRETED
from tests.support.layouts import packed
from tests.support.refusal import refusal
from tests.support.rollout import Rollout
from tests.support.routed_experts import bias, biased_model, roll_out

TOKENS = 136
ON_GPU = world.device().type == "cuda"
# As far as they are equal in both models: Megatron has scores in fp32, and those of a GPU differ by
# a rounding (3e-7 in log-probabilities, on an H200).
CLOSE = {"rtol": 1e-6, "atol": 1e-6} if ON_GPU else {"rtol": 1e-11, "atol": 1e-11}
CLOSE_GRADIENTS = {"rtol": 1e-5, "atol": 1e-5} if ON_GPU else {"rtol": 1e-9, "atol": 1e-10}


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return roll_out(bias(biased_model()))


@pytest.fixture(scope="module")
def expected(rollout):
    """Log-probabilities in the training forward of the model that sampled, and its gradients."""
    log_probs = rollout.forward(TOKENS)
    return log_probs, gradients(rollout.model, log_probs)


def gradients(model, log_probs):
    model.zero_grad()
    log_probs.sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def other_bias(rollout: Rollout, **fields):
    """The model with another bias of the experts, and so other choices, everything else equal."""
    model = biased_model(**fields)
    model.load_state_dict(rollout.model.state_dict())
    return bias(model, seed=2)


RECOMPUTED = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@pytest.mark.parametrize("layout", ["sbhd", "thd", "thd_padded"])
@pytest.mark.parametrize("recomputed", RECOMPUTED.values(), ids=RECOMPUTED)
def test_the_rollouts_experts(rollout, expected, layout, recomputed):
    """Log-probabilities and gradients are those of the model that sampled."""
    layout = rollout.layouts(TOKENS)[layout]
    log_probs, of_parameters = expected
    model = other_bias(rollout, **recomputed)
    assert (rollout.forward(layout, model=model) - log_probs).abs().max() > 1e-2
    with replay_routed_experts(model, rollout.laid_out(training_routed_experts, layout)):
        found = rollout.forward(layout, model=model)
    torch.testing.assert_close(found, log_probs, **CLOSE)
    # After another forward, of which backward is never called.
    rollout.forward(layout, model=model)
    torch.testing.assert_close(gradients(model, found), of_parameters, **CLOSE_GRADIENTS)


def test_microbatches_in_flight(rollout, expected):
    """Backward after the forwards of several, as in a pipeline."""
    log_probs, of_parameters = expected
    model = other_bias(rollout, **RECOMPUTED["full"])
    experts = training_routed_experts([rollout.requests[:2], rollout.requests[2:]], [TOKENS] * 2)
    with replay_routed_experts(model, [*experts, None]):
        parts = [rollout.forward(TOKENS, part, model) for part in (slice(2), slice(2, None))]
        rollout.forward(TOKENS, model=model)
        with refusal("no routed experts left"):
            rollout.forward(TOKENS, model=model)
    torch.testing.assert_close(torch.cat(parts), log_probs, **CLOSE)
    found = gradients(model, torch.cat(parts))
    torch.testing.assert_close(found, of_parameters, **CLOSE_GRADIENTS)


def test_importance_ratio():
    """In parity mode 1 to the bit with replay, and not without."""
    # What the kernels of parity mode on a GPU compute in, and the widths that they accept.
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    with batch_invariant_mode(world.device().type):
        options = AbsorbedMLAOptions(batch_invariant=True)
        sampled = bias(biased_model(dtype, options=options, mla=INTERPRETED))
        rollout = roll_out(sampled)
        model = biased_model(dtype, options=options, mla=INTERPRETED)
        model.load_state_dict(sampled.state_dict())
        bias(model, seed=2)
        log_probs = rollout.forward(TOKENS)
        own = rollout.forward(TOKENS, model=model)
        with replay_routed_experts(model, rollout.laid_out(training_routed_experts, TOKENS)):
            found = rollout.forward(TOKENS, model=model)
    assert torch.equal((found - log_probs).exp(), torch.ones_like(found))
    assert ((own - log_probs).exp() - 1).abs().max() > 0.1


def test_rollout_in_bf16():
    """Near ties between bf16 and fp32: replay takes the largest gaps away."""
    fields = {"init_method_std": 0.2}
    model = biased_model(torch.float32, **fields)
    for router in decoder_routers(model, "a test"):
        with torch.no_grad():
            # Scores closer to each other than bf16 tells apart.
            router.weight.mul_(1e-3)
        router.expert_bias.zero_()
    low = biased_model(torch.bfloat16, **fields)
    low.load_state_dict(model.state_dict())
    rollout = roll_out(low)
    own = rollout.forward(TOKENS, model=model)
    experts = rollout.laid_out(training_routed_experts, TOKENS)
    with replay_routed_experts(low, experts), replay_routed_experts(model, experts):
        log_probs = rollout.forward(TOKENS).float()
        found = rollout.forward(TOKENS, model=model)
    gaps = [float((one - log_probs).abs().max()) for one in (own, found)]
    assert gaps[1] < gaps[0] / 3, gaps


def test_tokens_without_a_record(rollout):
    """The router chooses where the numbers are -1."""
    model = other_bias(rollout)
    none = [np.full_like(one, -1, dtype=np.int64) for one in rollout.requests]
    with replay_routed_experts(model, training_routed_experts([none], [TOKENS])):
        found = rollout.forward(TOKENS, model=model)
    assert torch.equal(found, rollout.forward(TOKENS, model=model))


def test_requests_of_several_dtypes():
    """Large numbers behind small ones, and a request of no token."""
    small = np.arange(4).reshape(1, 2, 2)
    [found] = training_routed_experts([[small, small + 2**15, small[:0]]], [2])
    assert found.dtype == torch.int32 and found[0, 1].tolist() == (small[0] + 2**15).tolist()
    assert bool((found[:, 2] == -1).all())


class TestRefused:
    def test_layouts(self, rollout):
        twice = [np.array([[[0, 1, 1]]])]
        with refusal("different ones, got [0, 1, 1] for token 0"):
            training_routed_experts([twice], [TOKENS])
        one = np.zeros((2, 2, 1), int)
        for request, shown in ((np.arange(3), "(3,)"), (None, "None")):
            with refusal("[tokens, layers, K]", shown):
                training_routed_experts([[request]], [TOKENS])
        with refusal("one number of layers and K, got [(1, 1), (2, 1)]"):
            training_routed_experts([[one, one[:, :1]]], [TOKENS])
        with refusal("sequence 0 must have the 133 tokens"):
            training_routed_experts([rollout.requests], [132])
        with refusal("1 microbatches and 2 layouts"):
            training_routed_experts([rollout.requests], [TOKENS, TOKENS])
        with refusal("2 sequences for 1 requests"):
            layout = packed((140, 20)).packed_seq_params("cpu")
            training_routed_experts([rollout.requests[:1]], [layout])

    def test_shapes(self, rollout):
        model = other_bias(rollout)
        requests = rollout.requests
        for wrong, tokens, shown in (
            ([one[..., :2] for one in requests], TOKENS, "[tokens, batch, layers, 3]"),
            ([one[:, :1] for one in requests], TOKENS, "[tokens, batch, layers, 3]"),
            ([one + 100 for one in requests], TOKENS, "below num_moe_experts"),
            (requests, TOKENS + 4, f"tokens on this rank, got {len(requests) * (TOKENS + 4)}"),
        ):
            experts = training_routed_experts([wrong], [tokens])
            with refusal(shown), replay_routed_experts(model, experts):
                rollout.forward(TOKENS, model=model)

    @pytest.mark.parametrize(
        ("field", "value"), [("moe_router_fusion", True), ("cuda_graph_impl", "local")]
    )
    def test_models(self, monkeypatch, field, value):
        model = biased_model()
        monkeypatch.setattr(model.config, field, value)
        with refusal("replay_routed_experts", field, f"{value}"), replay_routed_experts(model, []):
            pass
