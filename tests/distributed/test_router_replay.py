"""Routed experts of rollouts over ranks, replayed in training over the same ranks.

Another bias of the experts chooses others with equal probabilities: log-probabilities are those of
the rollout if every token goes to the experts that it went to there. If these fail, ranks record
or replay experts of other tokens or layers.
"""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from absorbed_mla.inference import prefill_context_parallel
from absorbed_mla.router_replay import replay_routed_experts, training_routed_experts
from tests.support import needs, world
from tests.support.divided import divided_model, divided_world
from tests.support.engine import CHUNKED, engine_of, generate
from tests.support.layouts import cut_tokens, dense
from tests.support.pipeline import Model, load, whole_weights
from tests.support.routed_experts import (
    BIASED,
    REQUESTS,
    bias,
    biased_model,
    own_experts,
    roll_out,
)

pytestmark = needs.processes(2)

TOKENS = 136
SHARED = {"decode_context_parallel": True}
# Parallel sizes, fields of the model, options of the engine.
RANKS = {
    "tensor parallel": ({"tp": 2}, {"sequence_parallel": True}, CHUNKED),
    "shared cache": ({"tp": 2}, {"sequence_parallel": True}, SHARED),
    "experts of tensor-parallel ranks": (
        {"tp": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"sequence_parallel": True, "expert_model_parallel_size": 2},
        {},
    ),
    "experts of replicas": (
        {"expert_model_parallel_size": 2},
        {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
        {},
    ),
    "context parallel": ({"cp": 2}, {"context_parallel_size": 2}, {**CHUNKED, **SHARED}),
}


def log_probs_of(model, texts):
    """Log-probabilities of the texts' tokens but the first; None on stages without logits."""
    layout, cp = dense(TOKENS, len(texts)), world.cp_size()
    ids = torch.tensor([[*text, *[0] * (TOKENS - len(text))] for text in texts])
    own = ids[:, cut_tokens(layout, cp, world.cp_group().rank())].to(world.device())
    found: list[torch.Tensor] = []

    def keep(logits):
        found.append(logits)
        return logits.sum(), {}

    def forward_step(data, chunk):
        return chunk(own, torch.zeros_like(own), None), keep

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        found.append(model(own, torch.zeros_like(own), None))
    else:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=TOKENS,
            micro_batch_size=len(texts),
            forward_only=True,
        )
    if not found:
        return None
    logits = world.gather(gather_from_tensor_model_parallel_region(found[0]), 1, world.cp_group())
    order = torch.cat([torch.as_tensor(cut_tokens(layout, cp, rank)) for rank in range(cp)])
    rows = logits[:, order.argsort()].log_softmax(-1)
    return [
        row[: len(text) - 1].gather(-1, torch.tensor(text[1:], device=row.device)[:, None])
        for row, text in zip(rows, texts)
    ]


def check(model, requests=REQUESTS, **options):
    """The log-probabilities of a rollout, in training with another bias."""
    run = generate(
        engine_of(bias(model), enable_return_routed_experts=True, **options),
        requests,
        log_probs=True,
    )
    texts = [[*request.prompt, *tokens] for request, tokens in zip(requests, run.tokens)]
    own = log_probs_of(bias(model, seed=2), texts)
    group = world.cp_group() if world.cp_size() > 1 else None
    experts = [result.routed_experts for result in run.results]
    with replay_routed_experts(model, training_routed_experts([experts], [TOKENS], group)):
        found = log_probs_of(model, texts)
    if found is None:
        return
    gaps = []
    for result, *both in zip(run.results, own, found):
        expected = torch.tensor(result.log_probs, dtype=torch.float64)
        gaps.append([(one[-len(expected) :, 0].cpu() - expected).abs().max() for one in both])
    largest = torch.tensor(gaps).amax(0)
    # Those of the engine are fp32.
    assert largest[1] < 1e-5 and largest[0] > 1e-2, gaps


@pytest.mark.parametrize("sizes, fields, options", RANKS.values(), ids=RANKS)
def test_ranks(sizes, fields, options, monkeypatch):
    monkeypatch.setattr(prefill_context_parallel, "LEAST_TOKENS", 1)
    with world.parallel(**sizes):
        replicas = parallel_state.get_data_parallel_rank() + 1
        check(biased_model(**fields), REQUESTS[::replicas], **options)


def test_stages():
    fields = {**BIASED, "num_layers": 4, "cache_mla_latents": True, "init_method_std": 0.4}
    del fields["moe_layer_freq"]  # the model's own, of four layers
    model = Model(dtype=torch.float64, experts=True, fields=tuple(fields.items()))
    with world.parallel():
        whole = whole_weights(model)
    with world.parallel(pipeline_model_parallel_size=2):
        [part] = model.build()
        load([part], whole)
        check(part)


def test_data_parallel_attention():
    """Each rank has requests of its own; all compute the experts of all tokens."""
    fields = {**BIASED, "init_method_std": 0.4}
    with divided_world():
        model = bias(divided_model(dtype=torch.float64, **fields))
        rollout = roll_out(model, REQUESTS[world.rank() :: 2])
    with world.parallel(tp=1):
        whole = bias(biased_model())
        for text, found in zip(rollout.texts, rollout.requests):
            expected = own_experts(whole, text)[:-1]
            assert torch.equal(torch.as_tensor(found).sort(-1).values.long(), expected)
    dist.barrier()
