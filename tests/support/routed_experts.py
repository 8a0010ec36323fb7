"""Models with experts whose rollouts say which of them each token was routed to."""

import torch
from megatron.core.models.gpt import GPTModel

from absorbed_mla.router_replay import decoder_routers, replace_choice
from absorbed_mla.serving.engine import Engine
from tests.support import world
from tests.support.engine import Request, engine_of, generate, generating_model, prompt
from tests.support.models import MIXED
from tests.support.rollout import Rollout

# A bias only chooses: with another one the same experts have the same probabilities.
BIASED = {
    **MIXED,
    "num_moe_experts": 8,
    "moe_router_topk": 3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
REQUESTS = [
    *(Request(prompt(n, n, shared=min(n, 100)), 8) for n in (126, 110, 60)),
    Request(prompt(5), 4),
]


def biased_model(dtype: torch.dtype = torch.float64, **fields) -> GPTModel:
    """A model whose log-probabilities depend on which experts are chosen."""
    return generating_model(dtype=dtype, **{**BIASED, "init_method_std": 0.4, **fields})


def bias(model: GPTModel, seed: int = 1) -> GPTModel:
    """Have the routers of a model choose other experts; returns it."""
    for router in decoder_routers(model, "a test"):
        # Any stage has the same ones.
        generator = torch.Generator().manual_seed(seed + router.layer_number)
        router.expert_bias.copy_(torch.rand(len(router.expert_bias), generator=generator))
    return model


def roll_out(model: GPTModel, requests=REQUESTS, **options) -> Rollout:
    """Generated texts, and the experts of their tokens."""
    engine = engine_of(model, enable_return_routed_experts=True, **options)
    run = generate(engine, requests)
    assert_forgotten(engine)
    statistics = run.statistics
    assert "blocks" not in options or statistics.evicted or statistics.most_paused
    assert "prefix_caching" not in options or any(one.num_cached_tokens for one in run.results)
    texts = [[*request.prompt, *tokens] for request, tokens in zip(requests, run.tokens)]
    return Rollout(model, texts, [result.routed_experts for result in run.results])


def assert_forgotten(engine: Engine) -> None:
    """Nothing is left of requests that have ended."""
    assert not engine._choices._requests
    for records in engine._choices._records.values():
        assert not records._released and not records._ended


def own_experts(model: GPTModel, text: list[int]) -> torch.Tensor:
    """What the routers choose in a training forward of a text, [tokens, layers, K], ascending."""
    found, undo = [], []

    def choose(scores, topk, default):
        values, chosen = default()
        found.append(chosen.sort(-1).values)
        return values, chosen

    for router in decoder_routers(model, "a test"):
        undo.append(replace_choice(router, choose))
    ids = torch.tensor([text], device=world.device())
    with torch.no_grad():
        # What forwards in inference mode need, and training's ignore.
        model(ids, torch.zeros_like(ids), None, runtime_gather_output=True)
    for one in undo:
        one()
    return torch.stack(found, dim=1).cpu()
