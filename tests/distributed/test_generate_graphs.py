"""generate.py --cuda-graphs: the tokens of the same steps from the host, and of steps as they come.

On a CPU nothing is captured, but steps are padded, and experts get room, as they are for graphs.
"""

import zlib
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.inference import utils as host_utils
from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

from absorbed_mla import cpu_host
from absorbed_mla.serving.engine import Engine
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs
from tests.support import needs, world
from tests.support.combinations import few_ranks, grid
from tests.support.generate import generate

pytestmark = few_ranks

_LAYERS, _NEW = 2, 10
_WORDS = (
    *("--preset", "tiny", "--num-layers", _LAYERS, "--ffn-hidden-size", 64),
    *("--num-tokens-to-generate", _NEW, "--greedy", "--ignore-eos", "--json"),
    # Prompts of one step, and of several chunks.
    *("--step-tokens", 64, "--prompt", "def f(", "--prompt", "y" * 70, "--prompt", "import os"),
)
# Of a log-probability after two layers.
_BF16_ERROR = 0.1
_TINY = ("--hidden-size", 32)
_DEEPSEEK_V3 = (
    *("--bf16", "--hidden-size", 256, "--num-attention-heads", 16, "--q-lora-rank", 1536),
    *("--kv-lora-rank", 512, "--qk-head-dim", 128, "--qk-pos-emb-head-dim", 64),
    *("--v-head-dim", 128),
)
_DENSE = ("--num-experts", 0)
_EXPERTS = ("--moe-layer-freq", "[0,1]", "--moe-token-dispatcher-type", "alltoall")

_LAYOUTS = {"": (), "sp": ("--sequence-parallel",)} if world.size() > 1 else {"": ()}
layouts = grid(1, {"layout": _LAYOUTS})
models = grid(1, {"model": {"dense": _DENSE, "experts": _EXPERTS}, "layout": _LAYOUTS})


@torch.no_grad()
def fill(gpt, folder: str) -> None:
    """In place of a checkpoint: weights that keep activations near unit size."""
    for name, parameter in gpt.named_parameters():
        if parameter.ndim > 1:
            part = 0
            if getattr(parameter, "tensor_model_parallel", False):
                part = parallel_state.get_tensor_model_parallel_rank()
            generator = torch.Generator(parameter.device)
            generator.manual_seed(zlib.crc32(f"{name} {part}".encode()))
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """Runs the command; what it writes of every prompt, on rank 0."""
    for module in ("entry", "model"):
        monkeypatch.setattr(f"generation.{module}.find_checkpoint", lambda folder: None)
    monkeypatch.setattr("generation.run.read_start", lambda folder, finetune: None)
    monkeypatch.setattr("generation.run.require_same_model", lambda *args: None)
    monkeypatch.setattr("generation.model.load_model_weights", fill)
    if not torch.cuda.is_available():
        monkeypatch.setattr("generation.run.check_model", lambda *args: None)
        event = lambda self: cpu_host._NoStream()  # noqa: E731
        monkeypatch.setattr(cpu_host._NoStream, "record_event", event, raising=False)

    def run(*words: object) -> list[dict]:
        # Of the first model in the process, which elsewhere is the only one.
        monkeypatch.setattr(host_utils, "moe_layer_cache", None)
        done = generate("--load", tmp_path, *_WORDS, *words)
        assert done.code == 0, done.err
        return done.rows[:-1] if world.rank() == 0 else []

    yield run
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


@pytest.fixture
def tokens(rows):
    """Runs the command; the tokens of every prompt, on rank 0."""
    return lambda *words: [row["tokens"] for row in rows(*words)]


def assert_same_until_a_tie(found: list[dict], expected: list[dict]) -> None:
    """Greedy texts, whose log-probabilities differ by what bf16 rounds, up to a token that may.

    Where tokens differ, both are the most likely one up to that.
    """
    for one, other in zip(found, expected, strict=True):
        assert len(one["tokens"]) == len(one["log_probs"]) == len(other["tokens"])
        pairs = zip(one["tokens"], other["tokens"], one["log_probs"], other["log_probs"])
        for token, wanted, log_prob, expected_log_prob in pairs:
            assert log_prob == pytest.approx(expected_log_prob, abs=_BF16_ERROR)
            if token != wanted:
                break


@pytest.fixture
def steps():
    """Of every step: whether it is padded for graphs, and how many layers' graphs are replayed."""
    replay, step, seen = _CudaGraphRunner.replay_graph_capture, Engine.step, []

    def watched(engine):
        before = spy.call_count
        result = step(engine)
        padded = engine.host.context.using_cuda_graph_this_step()
        seen.append((padded, spy.call_count - before))
        return result

    with (
        mock.patch.object(
            _CudaGraphRunner, "replay_graph_capture", autospec=True, side_effect=replay
        ) as spy,
        mock.patch.object(Engine, "step", watched),
    ):
        yield seen


@pytest.fixture
def from_the_host(monkeypatch):
    """``--cuda-graphs``, for which everything is done but the capture."""
    module = "absorbed_mla.serving.scheduler.cuda_graphs"

    def patch() -> None:
        monkeypatch.setattr(f"{module}.graph_fields", lambda scope: {})
        monkeypatch.setattr(f"{module}.require_model_fields", lambda config: None)

    return patch


@needs.no_gpu
@models
def test_steps_as_of_graphs(tokens, steps, from_the_host, model, layout):
    expected = tokens(*_TINY, *model, *layout)
    assert not any(padded for padded, _ in steps)
    steps.clear()
    from_the_host()
    assert tokens(*_TINY, *model, *layout, "--cuda-graphs") == expected
    # With experts, steps that read a prompt stay as they come.
    assert all(padded for padded, _ in steps) is (model is _DENSE)
    assert sum(padded for padded, _ in steps) >= _NEW - 2


@needs.gpu
@models
def test_captured(rows, steps, from_the_host, model, layout):
    """On the same sizes; kernels divide their work by the bounds of a graph, or by lengths."""
    words = (*_DEEPSEEK_V3, *model, *layout, "--cuda-graphs", "--return-log-probs")
    found = rows(*words)
    # Decode steps are one graph, which is none of a layer's.
    assert {replays for captured, replays in steps if captured} <= {0, _LAYERS}
    assert sum(captured for captured, _ in steps) >= _NEW - 2
    from_the_host()
    steps.clear()
    assert_same_until_a_tie(found, rows(*words))
    assert not any(replays for _, replays in steps)


@needs.gpu
@layouts
def test_captured_in_parity_mode(tokens, steps, layout):
    """Whatever a step is padded to."""
    words = (*_DEEPSEEK_V3, *_DENSE, *layout, "--batch-invariant")
    expected = tokens(*words)
    assert not any(replays for _, replays in steps)
    # Decode steps are one graph, and so are those that read prompts where whole steps are captured.
    run = mock.patch.object(FullCudaGraphs, "run", autospec=True, side_effect=FullCudaGraphs.run)
    with run as whole_steps:
        assert tokens(*words, "--cuda-graphs") == expected
    assert whole_steps.call_count >= _NEW - 2
