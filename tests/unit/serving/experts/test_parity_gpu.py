"""Grouped experts in parity mode on a GPU: the bits of Megatron's experts, also in CUDA graphs."""

import pytest
import torch

from absorbed_mla import LLM
from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.serving.weights.checkpoint import open_model
from tests.conversion.models import Architecture
from tests.support import needs
from tests.support.backends import determinism
from tests.support.experts import (
    ROUTED,
    activations,
    generated_and_trained,
    pair,
    signs_of_zero,
)
from tests.support.wide_models import wide_folder
from tests.unit.serving.experts.test_grouped_gpu import hidden
from tests.unit.serving.test_llm import token_ids
from tests.unit.serving.test_llm_gpu import GPU, PROMPTS, SAMPLED

pytestmark = needs.gpu

WIDTHS = {
    "hidden_size": 512,
    "num_moe_experts": 32,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 384,
    "moe_shared_expert_intermediate_size": 256,
    "activation_func": torch.nn.functional.silu,
}
# Up to eight rows of one expert, few and many in the mean; 1,100 tokens are sorted by PyTorch.
TOKENS = [1, 7, 300, 1100]


@pytest.fixture(scope="module", params=["allgather", "alltoall"])
def layers(request):
    """Megatron's MoE layer and the grouped one, with the same weights."""
    fields = {**ROUTED, **WIDTHS, "moe_token_dispatcher_type": request.param}
    models = pair(dtype=torch.bfloat16, **fields)
    return [model.decoder.layers[1].mlp for model in models]


PARTS = {"whole": None, "parts": 8}


@pytest.fixture(params=PARTS.values(), ids=[*PARTS])
def _on(request):
    with batch_invariant_mode("cuda", request.param):
        yield


@pytest.mark.parametrize("tokens", TOKENS)
def test_of_megatrons_experts(_on, layers, tokens):
    """As in a training forward, whose sums are deterministic if they are to be."""
    sequential, grouped = layers
    for seed in range(2):
        x = hidden(tokens, seed)
        with determinism(True, warn_only=True):
            expected = sequential.train()(x)[0].detach()
        with torch.inference_mode():
            assert torch.equal(grouped(x)[0], expected)


def test_activation(_on, monkeypatch, layers):
    """By one kernel; also the signs of zeros, which sums hide."""
    x = signs_of_zero(24, WIDTHS["moe_ffn_hidden_size"]).bfloat16().cuda()
    found, expected = activations(monkeypatch, *layers, x)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def test_in_any_batch(_on, layers):
    x = hidden(300)
    with torch.inference_mode():
        whole = layers[1](x)[0]
        for size in (1, 16, 70):
            assert torch.equal(layers[1](x[:size])[0], whole[:size]), size


@pytest.mark.parametrize("tokens", TOKENS)
def test_captured(_on, layers, tokens):
    """Nothing waits for the device, and a graph's replay follows the routing of its new tokens."""
    _, grouped = layers
    x, graph = hidden(tokens), torch.cuda.CUDAGraph()
    with torch.inference_mode():
        grouped(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = grouped(x)[0]
        for seed in (1, 2):
            x.copy_(hidden(tokens, seed))
            graph.replay()
            replayed = found.clone()
            assert torch.equal(replayed, grouped(x)[0])


def generated(folder, graphs: bool, *batches: list[int], **options) -> list[list[int]]:
    """Sampled tokens of the prompts with these numbers, one batch after another."""
    found = []
    with LLM(folder, max_num_seqs=8, parity=True, cuda_graphs=graphs, **options) as llm:
        for batch in batches:
            prompts, params = [PROMPTS[i] for i in batch], [SAMPLED[i] for i in batch]
            found += token_ids(llm.generate(prompts, params, use_tqdm=False))
        done = llm.statistics()
        assert not graphs or done.graph_steps == done.steps
        llm.require_no_leak()
    return found


@pytest.mark.parametrize("parts", PARTS.values(), ids=[*PARTS])
@pytest.mark.parametrize("topk", [2, 4])
def test_llm(tmp_path, topk, parts):
    """Together and from graphs of whole steps, as alone from the host.

    Megatron's experts would sum more than two by atomics there.
    """
    architecture = Architecture("v3", True, True, "rope")
    folder = wide_folder(tmp_path / "experts", architecture, num_experts_per_tok=topk, topk_group=2)
    alone, mode = [[i] for i in range(len(PROMPTS))], {"tensor_parallel_parts": parts}
    experts = "sequential" if topk == 2 else "grouped"
    expected = generated(folder, False, *alone, experts=experts, **mode)
    together = [*range(len(PROMPTS))]
    assert generated(folder, True, together, experts="grouped", **mode) == expected
    found, trained = generated_and_trained(open_model(folder), GPU, parts)
    assert torch.equal(found, trained)
