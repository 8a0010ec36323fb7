"""``LLM`` on GPUs: processes of its own, CUDA graphs, parity mode, a model in two shares.

Every position is compared with transformers in fp32; the bound is what transformers loses in bf16.
"""

import pytest
import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.weights.checkpoint import open_model
from absorbed_mla.serving.weights.load import load_model
from absorbed_mla.serving.weights.memory import WeightMemory
from tests.conversion.models import Architecture
from tests.support import needs
from tests.support.log_probs import ROUTED_FACTOR, assert_as_exact_as_bf16, written
from tests.support.wide_models import wide_folder
from tests.unit.serving.test_llm import token_ids

pytestmark = needs.gpu

PROMPTS = [list(range(1, 1 + length)) for length in (3, 70, 120, 64)]
NEW = 32
GPU = torch.device("cuda", 0)
SAMPLED = [
    SamplingParams(max_tokens=32, ignore_eos=True, seed=i, **more)
    for i, more in enumerate(
        [{}, {"top_p": 0.9, "temperature": 1.3}, {"min_p": 0.05}, {"frequency_penalty": 0.5}]
    )
]
# A machine with several GPUs runs these with one of them, too (scripts/checks/run_gpu_tests.sh).
SIZES = (min(2, torch.cuda.device_count()),)
# Experts, groups, groups of a token, experts of a token.
EXPERTS = {"8-2-1-2": (8, 2, 1, 2), "8-4-2-4": (8, 4, 2, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return wide_folder(tmp_path_factory.mktemp("dense"), Architecture("v3", True, False, "rope"))


@pytest.mark.parametrize("discard", [False, True])
def test_memory_of_weights(folder, discard):
    """95 % of it are free, and filled again with the same weights if they were kept."""
    model = load_model(open_model(folder), LLMOptions(tensor_parallel_size=1), GPU)
    saved = {name: weight.cpu() for name, weight in model.named_parameters()}
    size, before = sum(x.nbytes for x in saved.values()), torch.cuda.memory_allocated()
    memory = WeightMemory(model)
    memory.free(discard=discard)
    assert before - torch.cuda.memory_allocated() > 0.95 * size
    memory.allocate()
    assert before - torch.cuda.memory_allocated() < 0.05 * size
    kept = {
        name: torch.equal(weight.cpu(), saved[name]) for name, weight in model.named_parameters()
    }
    assert discard or all(kept.values())


def test_sleep_and_wake(folder):
    with LLM(folder, max_num_seqs=4) as llm:
        expected, found = [], []
        for outputs in (expected, found):
            outputs += llm.generate(PROMPTS, SAMPLED[0], use_tqdm=False)
            llm.sleep()
            llm.wake()
        tokens = [[one.outputs[0].token_ids for one in each] for each in (expected, found)]
        assert tokens[0] == tokens[1]


def with_experts(path, experts: str):
    names = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    changes = dict(zip(names, EXPERTS[experts], strict=True))
    return wide_folder(path, Architecture("v3", True, True, "rope"), **changes)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("tp", SIZES)
def test_log_probs_of_transformers(folder, tp, graphs):
    options = {"max_num_seqs": 8, "cuda_graphs": graphs, "prompt_logprobs": not graphs}
    with LLM(folder, tensor_parallel_size=tp, **options) as llm:
        texts = written(llm, PROMPTS, NEW, prompt_log_probs=not graphs)
        assert bool(llm.statistics().graph_steps) == graphs
        llm.require_no_leak()
    assert_as_exact_as_bf16(folder, texts, GPU)


@pytest.mark.parametrize("tokens", [None, 1024, 0])
@pytest.mark.parametrize("tp", SIZES)
def test_graphs_of_prompts(folder, tp, tokens):
    """Read in steps that one graph holds, or one for each layer; ``graph_steps`` counts them."""
    sizes = {"max_num_seqs": 8, "cuda_graphs": True, "prefill_graph_tokens": tokens}
    texts = []
    with LLM(folder, tensor_parallel_size=tp, **sizes) as llm:
        for _ in range(2):  # captured, and replayed
            texts += written(llm, PROMPTS, NEW, prompt_log_probs=False)
        done = llm.statistics()
        assert done.graph_steps == done.steps
        llm.require_no_leak()
    assert_as_exact_as_bf16(folder, texts, GPU)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("tp", SIZES)
def test_experts(tmp_path, tp, experts):
    """Alone and in a batch: few tokens and many are routed by other kernels."""
    path = with_experts(tmp_path / "experts", experts)
    with LLM(path, tensor_parallel_size=tp, max_num_seqs=8, prompt_logprobs=True) as llm:
        together = written(llm, PROMPTS, NEW)
        alone = [text for prompt in PROMPTS for text in written(llm, [prompt], NEW)]
    for texts in (together, alone):
        assert_as_exact_as_bf16(path, texts, GPU, ROUTED_FACTOR)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_parity_mode(folder, graphs):
    """Sampled, alone and together, from the host and from graphs: equal to the bit."""
    with LLM(folder, max_num_seqs=8, parity=True) as llm:
        alone = [
            token_ids(llm.generate([prompt], params, use_tqdm=False))[0]
            for prompt, params in zip(PROMPTS, SAMPLED)
        ]
    with LLM(folder, max_num_seqs=8, parity=True, cuda_graphs=graphs) as llm:
        together = token_ids(llm.generate(PROMPTS * 2, SAMPLED * 2, use_tqdm=False))
    assert together == alone * 2
