"""Selections of generated requests, replayed on context- and tensor-parallel ranks.

If these fail, ranks replay the keys of other tokens, or record different ones.
"""

from itertools import chain

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from absorbed_mla.dsa.replay import replay_selections
from absorbed_mla.dsa.request_selections import RequestSelections, training_selections
from tests.distributed.test_engine_pipeline import STAGES
from tests.support import needs, world
from tests.support.dsa import TINY_DSA, dsa_fields
from tests.support.dsa_models import generating_fields
from tests.support.engine import Request, engine_of, generate, generating_model, prompt
from tests.support.layouts import cut_tokens, dense, packed
from tests.support.pipeline import Model, load, whole_weights

pytestmark = needs.processes(2)

REQUESTS = [Request(prompt(length, length), 4) for length in (70, 9, 30)]
LAYOUTS = {"sbhd": dense(76, 3), "thd_padded": packed((74, 13, 34), (76, 16, 36))}


def model_of(**changes):
    fields = generating_fields(init_method_std=0.4, **changes)
    return generating_model(dtype=torch.float64, **fields)


def noisy_indexers(model):
    """The same on all ranks."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "indexer" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model


def roll_out(model):
    """Texts, and what was chosen for their tokens."""
    options = {"step_tokens": 64, "chunked_prefill": True, "enable_return_indexer_topk": True}
    run = generate(engine_of(model, **options), REQUESTS)
    texts = [[*request.prompt, *tokens] for request, tokens in zip(REQUESTS, run.tokens)]
    return texts, [RequestSelections.of(model, one.indexer_topk) for one in run.results]


def forward(model, texts, layout, rank=0):
    """Logits of this rank's tokens."""
    slots = layout.slots or [layout.tokens] * len(texts)
    rows = [[*text, *[0] * (slot - len(text))] for text, slot in zip(texts, slots)]
    ids = torch.tensor(rows if layout.lengths is None else [[*chain(*rows)]])
    ids = ids[:, cut_tokens(layout, world.cp_size(), rank)].to(world.device())
    params = layout.packed_seq_params(ids.device)
    logits = model(ids, torch.zeros_like(ids), None, packed_seq_params=params)
    return gather_from_tensor_model_parallel_region(logits)


def as_layout(layout):
    return layout.packed_seq_params("cpu") or layout.tokens


def of_one_process(layout):
    """Texts, what was chosen for their tokens, and logits."""
    with world.parallel():
        model = model_of()
        texts, requests = roll_out(model)
        return texts, requests, forward(model, texts, layout)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_context_parallel(layout):
    """Each rank replays its chunks of every sequence, in a model with other indexers."""
    texts, requests, expected = of_one_process(layout)
    with world.parallel(cp=2):
        cut = {"context_parallel_size": 2, "cp_comm_type": "allgather"}
        cut_model = noisy_indexers(model_of(**cut))
        rank, group = world.cp_group().rank(), world.cp_group()
        selections = training_selections([requests], [as_layout(layout)], group)
        with replay_selections(cut_model, selections):
            found = forward(cut_model, texts, layout, rank)
        own = forward(cut_model, texts, layout, rank)
    expected, real = (x[:, cut_tokens(layout, 2, rank)] for x in (expected, recorded(layout)))
    torch.testing.assert_close(found[real], expected[real], rtol=1e-11, atol=1e-11)
    assert (own[real] - expected[real]).abs().max() > 1e-2


def recorded(layout):
    """Which tokens of the layout are those that went through the model, [B, S]."""
    lengths = [len(request.prompt) + request.num_tokens - 1 for request in REQUESTS]
    if layout.lengths is None:
        return torch.stack([torch.arange(layout.tokens) < length for length in lengths])
    rows = (torch.arange(slot) < length for slot, length in zip(layout.slots, lengths))
    return torch.cat([*rows])[None]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tensor_parallel(layout):
    """Ranks record the same as one rank, and replay it under sequence parallelism."""
    texts, requests, expected = of_one_process(layout)
    with world.parallel(tp=2):
        cut_model = model_of(sequence_parallel=True)
        cut_texts, cut_requests = roll_out(cut_model)
        assert cut_texts == texts
        for one, other in zip(cut_requests, requests):
            torch.testing.assert_close(one.chosen, other.chosen, rtol=0, atol=0)
        selections = training_selections([cut_requests], [as_layout(layout)])
        with replay_selections(noisy_indexers(cut_model), selections):
            found = forward(cut_model, texts, layout)
    real = recorded(layout)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-11, atol=1e-11)


def test_stages():
    """Each records its layers."""
    fields = {**dsa_fields(TINY_DSA), "cache_mla_latents": True, "init_method_std": 0.2}
    model = Model(dtype=torch.float64, fields=tuple(fields.items()))
    found = []
    for sizes in ({}, STAGES):
        with world.parallel():
            whole = whole_weights(model)
        with world.parallel(**sizes):
            [part] = model.build()
            load([part], whole)
            found.append(roll_out(part)[1])
            stage = parallel_state.get_pipeline_model_parallel_rank()
    for one, part in zip(*found):
        assert part.num_tokens == one.num_tokens
        whole, own = list(one.chosen.values()), list(part.chosen.values())
        assert 0 < len(own) < len(whole)
        expected = whole[len(whole) - len(own) :] if stage else whole[: len(own)]
        torch.testing.assert_close(own, expected, rtol=0, atol=0)
