"""The engine over pipeline stages and ranks of experts: tokens of the whole model in one process.

If a test fails, stages or replicas schedule differently, or a token comes from other logits.
"""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.serving.sampling.parameters import SamplingParams
from tests.distributed.engines import CROWDED, PROMPTS, assert_crowded, assert_same
from tests.support import needs, world
from tests.support.cases import INTERPRETED
from tests.support.engine import engine_of
from tests.support.pipeline import Model, load, whole_weights

STAGES = {"pipeline_model_parallel_size": 2}
VIRTUAL = {**STAGES, "virtual_pipeline_model_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
KINDS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"temperature": 1.3, "top_k": 20, "frequency_penalty": 0.5, "seed": 3},
]
SAMPLING = [
    SamplingParams(max_tokens=7 + 2 * (i % 2), logprobs=2, **KINDS[i % len(KINDS)])
    for i in range(len(PROMPTS))
]
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}


def model_of(**changes) -> Model:
    fields = {"cache_mla_latents": True, "init_method_std": 0.2, **changes.pop("fields", {})}
    return Model(fields=tuple(fields.items()), **changes)


def run(model: Model, prompts, sampling, *, sizes=None, **options):
    """Results and statistics of an engine in a parallel layout."""
    sizes = sizes or {}
    tensor_parallel = {n: sizes[n] for n in sizes if n in ("tp", "expert_tensor_parallel_size")}
    with world.parallel(**tensor_parallel):
        whole = whole_weights(model)
    with world.parallel(**sizes):
        [part] = model.build()
        load([part], whole)
        engine = engine_of(part, **options)
        results = engine.generate(prompts, sampling)
        engine.require_no_leak()
        assert part.training
        return results, engine.statistics


def check(model: Model, sizes, prompts=PROMPTS, sampling=SAMPLING, *, whole=None, both=(), **ours):
    """Crowded in a parallel layout, results are those of one process.

    ``whole`` is the model there, ``both`` are options of both engines, ``ours`` of the layout's.

    Returns:
        Results and statistics.
    """
    found, done = run(model, prompts, sampling, sizes=sizes, **CROWDED, **dict(both), **ours)
    expected, _ = run(whole or model, prompts, sampling, **dict(both))
    assert_same(found, expected)
    return found, done


@pytest.mark.parametrize(
    "form, experts",
    [("auto", False), ("expanded", True)],
    ids=["auto-dense", "expanded-experts"],
)
@needs.processes(2)
def test_stages(form, experts):
    # The other rows of the embedding are padding.
    found, done = check(model_of(form=form, experts=experts), STAGES, both={"vocab_size": 30})
    assert max(max(one.tokens) for one in found) < 30
    assert_crowded(done)


@needs.processes(2)
def test_prompt_logprobs_on_all_stages():
    sampling = [one.replace(prompt_logprobs=1) for one in SAMPLING[:3]]
    both = {"prompt_logprobs": True}
    found, _ = check(model_of(experts=True), STAGES, PROMPTS[:3], sampling, both=both)
    assert len(found[0].prompt_log_probs) == len(PROMPTS[0]) - 1


@needs.processes(2)
def test_drafts():
    """The last stage has the MTP layers."""
    _, done = check(model_of(mtp_layers=2, experts=True), STAGES, num_speculative_tokens=2)
    assert done.drafted > done.accepted


@needs.processes(2)
def test_prefix_cache_on_disk(folder):
    """Every stage has files of its own layers; they agree on what is there."""
    model = model_of()
    expected, _ = run(model, PROMPTS[:2], SAMPLING[:2])
    for disk_blocks in (0, 1, 0):
        options = {"prefix_caching": True, "prefix_cache_dir": folder}
        found, done = run(model, PROMPTS[:2], SAMPLING[:2], sizes=STAGES, **options)
        dist.barrier()
        assert_same(found, expected)
        assert done.disk_blocks == disk_blocks
        if disk_blocks and not dist.get_rank():
            next(folder.glob("*/*.safetensors")).unlink()
        dist.barrier()


@pytest.mark.parametrize(
    "fields, sizes, options, error",
    [
        (
            {},
            EXPERTS,
            {"prefix_caching": True, "prefix_cache_dir": "nowhere"},
            "prefix_cache_dir must be None where data-parallel ranks share experts",
        ),
        ({}, STAGES, {"num_cuda_graphs": 4}, "CUDA graphs .* need one pipeline stage"),
        ({}, EXPERTS, {"num_cuda_graphs": 4}, "CUDA graphs .* need one pipeline stage and experts"),
        (
            {"moe_token_dispatcher_type": "allgather"},
            EXPERTS,
            {},
            "moe_token_dispatcher_type must be 'alltoall'",
        ),
        (
            {"pipeline_model_parallel_layout": [["embedding", *["decoder"] * 4], ["loss"]]},
            STAGES,
            {},
            "pipeline_model_parallel_layout: every stage must have a layer",
        ),
        ({}, VIRTUAL, {}, "virtual_pipeline_model_parallel_size must be None to generate, got 2"),
    ],
)
@needs.processes(2)
def test_refused(fields, sizes, options, error):
    model = model_of(experts=True, fields={**ALLTOALL, **fields})
    with world.parallel(**sizes), pytest.raises(ValueError, match=error):
        engine_of(model.build()[0], **options)


@needs.processes(2)
def test_replicas_that_share_experts():
    """Each has requests of its own, ends at another time, and rejects another prompt."""
    model = model_of(mtp_layers=2, experts=True, fields=ALLTOALL)
    own = slice(0, 2) if world.rank() == 0 else slice(1, 6)
    prompts, sampling = [[], *PROMPTS[own]], [SAMPLING[0], *SAMPLING[own]]
    options = {"num_speculative_tokens": 2}
    [refused, *found], _ = run(model, prompts, sampling, sizes=EXPERTS, **CROWDED, **options)
    expected, _ = run(model, PROMPTS[own], SAMPLING[own])
    assert refused.error
    assert_same(found, expected)


@needs.processes(2)
def test_parity_of_replicas():
    """Log-probabilities are equal to the bit, whatever the other replica sends to the experts."""
    # The kernels for GPUs need bf16, and other widths.
    kernels = {"mla": INTERPRETED, "dtype": torch.bfloat16} if torch.cuda.is_available() else {}
    model = model_of(experts=True, batch_invariant=True, fields=ALLTOALL, **kernels)
    own = slice(0, 2) if world.rank() == 0 else slice(2, 6)
    with batch_invariant_mode():
        found, _ = run(model, PROMPTS[own], SAMPLING[own], sizes=EXPERTS, **CROWDED)
        expected, _ = run(model, PROMPTS[own], SAMPLING[own])
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.log_probs == other.log_probs


@needs.processes(4)
@pytest.mark.parametrize(
    "fields, sizes, options",
    [
        ({"sequence_parallel": True}, {"tp": 2, **STAGES}, {"decode_context_parallel": True}),
        (ALLTOALL, {**EXPERTS, **STAGES}, {}),
        # Experts' ranks are the tensor-parallel ones, so replicas need not wait for each other.
        ({"sequence_parallel": True}, {"tp": 2, **EXPERTS, "expert_tensor_parallel_size": 1}, {}),
    ],
    ids=["tp-pp-shared-cache", "ep-pp", "ep-in-tp"],
)
def test_together(fields, sizes, options):
    with world.parallel(**sizes):
        own = parallel_state.get_data_parallel_rank()
    prompts, sampling = PROMPTS[own : own + 2 + own], SAMPLING[own : own + 2 + own]
    fields = {**fields, "expert_tensor_parallel_size": sizes.get("expert_tensor_parallel_size")}
    whole = model_of(experts=True, fields={**fields, "sequence_parallel": False})
    check(model_of(experts=True, fields=fields), sizes, prompts, sampling, whole=whole, **options)
