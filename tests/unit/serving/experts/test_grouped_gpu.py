"""Grouped experts on a GPU: PyTorch's grouped product, no wait for the device, CUDA graphs."""

import pytest
import torch

from absorbed_mla import LLM
from absorbed_mla.serving.experts.product import grouped_product, why_not_grouped
from tests.support import needs
from tests.support.experts import ROUTED, pair
from tests.support.log_probs import ROUTED_FACTOR, assert_as_exact_as_bf16, written
from tests.unit.serving.test_llm_gpu import GPU, NEW, PROMPTS, with_experts

WIDTHS = {
    "hidden_size": 512,
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "activation_func": torch.nn.functional.silu,
}
# Few tokens choose few experts.
TOKENS = [1, 3, 128, 2048]


def refused() -> str | None:
    """Why the machine's GPU has no grouped product."""
    if not needs.HAS_GPU:
        return None
    return why_not_grouped(torch.device("cuda", 0), torch.bfloat16, {})


pytestmark = needs.gpu_with("a grouped product", refused())


@pytest.fixture(scope="module")
def layers():
    """Megatron's MoE layer and the grouped one, with the same weights."""
    models = pair(dtype=torch.bfloat16, **{**ROUTED, **WIDTHS})
    return [model.decoder.layers[1].mlp for model in models]


def hidden(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, 1, WIDTHS["hidden_size"], generator=generator, device="cuda")
    return x.bfloat16()


@pytest.mark.parametrize("tokens", TOKENS)
def test_of_megatrons_experts(layers, tokens):
    x = hidden(tokens)
    with torch.inference_mode():
        expected, found = (layer(x)[0].double() for layer in layers)
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("tokens", TOKENS)
def test_nothing_waits_for_the_device(layers, tokens):
    """And the same input has the same output, to the bit."""
    x = hidden(tokens)
    with torch.inference_mode():
        expected = layers[1](x)[0]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = layers[1](x)[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", TOKENS)
def test_captured(layers, tokens):
    """A graph's replay follows the routing of its new tokens: to the bit what the host runs."""
    x = hidden(tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        layers[1](x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = layers[1](x)[0]
        for seed in (1, 2):
            x.copy_(hidden(tokens, seed))
            graph.replay()
            replayed = found.clone()
            assert torch.equal(replayed, layers[1](x)[0])


@pytest.mark.parametrize("ends", [[0, 7, 7, 40], [40, 40, 40, 40], [1, 2, 3, 4], [0, 0, 0, 0]])
def test_product(ends):
    """Also of experts without rows, and with rows behind the last end, which stay undefined."""
    rows, weights = hidden(40).squeeze(1), hidden(4 * 96, 1).view(4, 96, -1)
    found = grouped_product(rows, weights, torch.tensor(ends, dtype=torch.int32, device="cuda"))
    for weight, begin, end in zip(weights, [0, *ends], ends):
        expected = rows[begin:end].float() @ weight.float().T
        torch.testing.assert_close(found[begin:end].float(), expected, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_llm(tmp_path, graphs):
    """Steps that read prompts are captured, too."""
    folder = with_experts(tmp_path / "experts", "8-2-1-2")
    with LLM(folder, max_num_seqs=8, experts="grouped", cuda_graphs=graphs) as llm:
        texts = written(llm, PROMPTS, NEW, prompt_log_probs=False)
        done = llm.statistics()
        assert done.graph_steps == (done.steps if graphs else 0)
        llm.require_no_leak()
    assert_as_exact_as_bf16(folder, texts, GPU, ROUTED_FACTOR)
