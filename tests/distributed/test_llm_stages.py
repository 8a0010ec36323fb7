"""``LLM`` over pipeline stages and ranks of experts: the tokens of transformers' ``generate``.

If a test fails, a rank has read another share of a checkpoint than its own.
"""

import pytest
import torch

from absorbed_mla import LLM, SamplingParams
from tests.conversion.models import Architecture
from tests.distributed.llm import generated, sampled, token_ids
from tests.distributed.whole import of_all_ranks
from tests.support import needs, world
from tests.support.engine import prompt
from tests.support.pipeline import LAYOUTS, Model, load, microbatches, train_step, whole_weights
from tests.support.pipeline import weights as weights_of

# Two layers on the first stage, one on the last.
LAYERS = {"num_hidden_layers": 3, "vocab_size": 131}
EXPERTS = Architecture("v3", True, True, "yarn"), LAYERS
TIED = Architecture("v3", True, False, "rope"), {**LAYERS, "tie_word_embeddings": True}
# Options of LLM, and Megatron's sizes, which are those of this process already.
PP = (
    {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
)
EP = (
    {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    {"tp": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
)
# Two halves of each expert, and both with pipeline stages.
TP_EP = (
    {"tensor_parallel_size": 4, "expert_parallel_size": 2},
    {"tp": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
)
PP_EP = {**EP[0], **PP[0], "tensor_parallel_size": 2}, {**EP[1], **PP[1]}
CASES = {
    2: {"experts-pp": (EXPERTS, PP), "experts-ep": (EXPERTS, EP), "tied-pp": (TIED, PP)},
    4: {"tp-ep": (EXPERTS, TP_EP), "pp-ep": (EXPERTS, PP_EP)},
}.get(world.size(), {})


@needs.processes(2, 4)
@pytest.mark.parametrize("model, layout", CASES.values(), ids=CASES)
def test_tokens_of_transformers(saved, model, layout):
    architecture, changes = model
    path, expected = saved(architecture, **changes)
    options, sizes = layout
    with world.parallel(**sizes):
        assert generated(path, **options) == expected


@needs.processes(2)
@pytest.mark.parametrize("layout", [PP, EP], ids=["pp", "ep"])
def test_drafts_and_chunks(drafting, layout):
    """The MTP layer is on the last stage, which needs the embedding, too."""
    options, sizes = layout
    options = {"num_speculative_tokens": 2, "max_num_batched_tokens": 40, **options}
    with world.parallel():
        expected = sampled(drafting, tensor_parallel_size=1)
    with world.parallel(**sizes):
        assert sampled(drafting, **options) == expected


LIVE = {
    "pp": PP[1],
    "ep": {"expert_model_parallel_size": 2},
}


@needs.processes(2)
@pytest.mark.parametrize("sizes", LIVE.values(), ids=LIVE)
def test_a_model_that_is_trained(sizes):
    """A rollout between two steps changes nothing; its tokens are those of the new weights.

    Ranks that share experts have prompts of their own, and end after another number of steps.
    """
    fields = {"cache_mla_latents": True, "init_method_std": 0.2}
    if "expert_model_parallel_size" in sizes:
        fields["moe_token_dispatcher_type"] = "alltoall"
    model = Model(experts=True, fields=tuple(fields.items()))
    own = world.rank() if "expert_model_parallel_size" in sizes else 0
    prompts = [prompt(70 + seed, seed) for seed in range(own, 2 + 2 * own)]
    params = SamplingParams(max_tokens=8 + 5 * own, seed=1, logprobs=0)
    with world.parallel():
        weights = whole_weights(model)
    with world.parallel(**sizes):
        rolling, plain = model.build(), model.build()
        load(rolling, weights)
        load(plain, weights)
        with LLM.from_model(rolling[0], max_model_len=128, max_num_seqs=4) as llm:
            step(rolling, 0)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            gradients = step(rolling, 1)
        step(plain, 0)
        expected = step(plain, 1)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name
    trained = whole_after_a_step(model, weights, sizes)
    with world.parallel():
        [alone] = model.build()
        load([alone], trained)
        with LLM.from_model(alone, max_model_len=128, max_num_seqs=4) as llm:
            expected = llm.generate(prompts, params, use_tqdm=False)
    assert token_ids(outputs) == token_ids(expected)


def step(chunks, seed: int) -> dict[str, torch.Tensor]:
    """A step of gradient descent; all replicas have the same data. Returns the gradients."""
    layout = LAYOUTS["sbhd"]
    _, gradients = train_step(chunks, layout, microbatches(layout, [seed, seed + 10]))
    with torch.no_grad():
        for name, parameter in weights_of(chunks).items():
            parameter -= 0.05 * gradients[name]
    return gradients


def whole_after_a_step(model: Model, weights, sizes) -> dict[str, torch.Tensor]:
    """Weights of the whole model, from the ranks of the layout."""
    with world.parallel(**sizes):
        chunks = model.build()
        load(chunks, weights)
        step(chunks, 0)
        own = {n: p.detach().clone() for n, p in weights_of(chunks).items()}
        parts = of_all_ranks(own)
    return {name: weight for part in parts for name, weight in part.items()}


@needs.processes(2)
def test_virtual_stages_are_refused():
    with world.parallel(**PP[1], virtual_pipeline_model_parallel_size=2):
        chunks = Model(fields=(("cache_mla_latents", True),)).build()
        with pytest.raises(ValueError, match="virtual pipeline stages cannot generate"):
            LLM.from_model(chunks)
        with pytest.raises(ValueError, match="virtual_pipeline_model_parallel_size must be None"):
            LLM.from_model(chunks[0], max_model_len=128)


@needs.processes(2)
@pytest.mark.parametrize(
    "options, error",
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size must divide torchrun's 2"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            "tensor_parallel_size must divide torchrun's 2 processes, got 2 with 2 pipeline stages",
        ),
        (
            {"expert_parallel_size": 2, "tensor_parallel_size": 1},
            "expert_parallel_size must divide",
        ),
    ],
)
def test_refused(drafting, options, error):
    with pytest.raises(ValueError, match=error):
        LLM(drafting, **options)
