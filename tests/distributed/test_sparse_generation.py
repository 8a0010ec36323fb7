"""Generation with sparse attention over ranks: greedy tokens of transformers and of one process.

If these fail, ranks cache or choose different keys, or a converted model does not go on as
transformers' does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.batch_invariant import batch_invariant_mode
from tests.distributed.test_engine_pipeline import CROWDED, PROMPTS, SAMPLING, STAGES, assert_same
from tests.distributed.test_engine_pipeline import model_of as stages_of
from tests.distributed.test_engine_pipeline import run as run_stages
from tests.distributed.test_sparse_logits import LAYERS, weights_of
from tests.support import needs, world
from tests.support.cases import INTERPRETED, TINY
from tests.support.combinations import few_ranks
from tests.support.dsa import TINY_DSA, dsa_fields
from tests.support.dsa_models import DSA, generating_fields
from tests.support.engine import (
    Request,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    generating_model,
    prompt,
)
from tests.support.parity import differences, parity_model
from tests.support.transformers_dsa import DEEPSEEK, GLM, MLA, model_of

NEW_TOKENS = 64


def transformers_model(dsa, **changes):
    """Random weights that make the text depend on all of it."""
    torch.manual_seed(1)
    theirs = model_of(dsa, dsa is GLM, num_hidden_layers=LAYERS, **changes)
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn_like(parameter)
            wide = parameter.ndim == 2
            parameter.copy_(noise / parameter.shape[1] ** 0.5 if wide else 1 + noise / 5)
    return theirs.float()


def their_tokens(theirs, prompts) -> list[list[int]]:
    """What ``generate`` of transformers adds to each prompt."""
    found = []
    for text in prompts:
        texts = theirs.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(texts[0, len(text) :].tolist())
    return found


@needs.processes(1, 2)
@pytest.mark.parametrize(
    ("dsa", "sharing"),
    [(DEEPSEEK, {}), (GLM, {}), (GLM, {"dsa_indexer_topk_freq": 2})],
    ids=["v3.2", "glm-5", "glm-5.2"],
)
def test_tokens_of_transformers(dsa, sharing):
    """64 greedy tokens after prompts longer than top-k, together in one engine."""
    types = {"indexer_types": ["full", "shared"] * 2} if sharing else {}
    theirs = transformers_model(dsa, **types)
    prompts = [prompt(length, seed) for seed, length in enumerate((17, 70))]
    expected = their_tokens(theirs, prompts)
    fields = {
        **dsa_fields(dsa),
        **sharing,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "num_layers": LAYERS,
        "activation_func": F.silu,
        "ffn_hidden_size": theirs.config.intermediate_size,
        "layernorm_epsilon": theirs.config.rms_norm_eps,
    }
    with world.parallel(tp=world.size()):
        options = AbsorbedMLAOptions(latent_norm_eps=1e-6)
        model = generating_model(options, mla=MLA if dsa is GLM else dsa.mla, **fields)
        weights = weights_of(theirs)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        requests = [Request(text, NEW_TOKENS) for text in prompts]
        run = generate(engine_of(model, step_tokens=64, chunked_prefill=True), requests)
    assert run.tokens == expected
    assert all(len(set(tokens)) > NEW_TOKENS // 4 for tokens in expected), "it repeats itself"


# They share a block, and cross the end of another together.
REQUESTS = [Request(prompt(120, seed, shared=70), 12) for seed in range(6)]


@few_ranks
@pytest.mark.parametrize(
    ("sequence_parallel", "cache"),
    [(False, "model"), (True, "model"), pytest.param(True, "fp8", marks=needs.processes(2))],
)
def test_everything_at_once(sequence_parallel, cache):
    """Chunks, shared prefixes, preemption and the sizes of graphs; every rank schedules alike."""
    fields = generating_fields(sequence_parallel=sequence_parallel and world.tp_size() > 1)
    rounded = cache == "fp8"
    options = AbsorbedMLAOptions(latent_cache_dtype=cache, train_on_cached_latents=rounded)
    model = generating_model(options, **fields)
    engine = engine_of(
        model,
        step_tokens=64,
        chunked_prefill=True,
        prefix_caching=True,
        num_cuda_graphs=4,
        blocks=9,
        paused_blocks=1,
    )
    run = generate(engine, REQUESTS, log_probs=True)
    assert_generates(run, by_whole_forwards(model, REQUESTS))
    done = run.statistics
    assert done.chunks and done.prefix_blocks and done.evicted + done.most_paused


@needs.processes(2)
def test_parity():
    """Equal to the bit in training with SP, prefill and decode without."""
    dsa, dtype = DSA, torch.float32
    if torch.cuda.is_available():  # whose kernels need bf16, and other widths
        dsa, dtype = replace(DSA, mla=INTERPRETED, width=16), torch.bfloat16
    sizes = {"tensor_model_parallel_size": world.tp_size(), "sequence_parallel": True}
    with batch_invariant_mode():
        model = parity_model(dtype, mla=dsa.mla, num_layers=2, **dsa_fields(dsa), **sizes)
        assert differences(model) == []


@needs.processes(2)
@pytest.mark.parametrize("topk", [DSA.topk, 100])
def test_stages(topk):
    """Each stage has index keys of its own layers with an indexer: one of two."""
    assert TINY_DSA.mla is TINY
    fields = {**dsa_fields(TINY_DSA), "dsa_indexer_topk": topk, "dsa_indexer_topk_freq": 4}
    model = stages_of(fields=fields)
    found, _ = run_stages(model, PROMPTS, SAMPLING, sizes=STAGES, **CROWDED)
    expected, _ = run_stages(model, PROMPTS, SAMPLING)
    assert_same(found, expected)
