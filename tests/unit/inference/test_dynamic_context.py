"""The attention over Megatron's ``DynamicInferenceContext``, against forwards without a cache."""

import contextlib
from typing import ClassVar

import pytest
import torch
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor
from torch.overrides import TorchFunctionMode

from absorbed_mla.inference.caches.dynamic import DynamicStep, of_active_requests
from absorbed_mla.inference.context_config import context_config
from absorbed_mla.registry import PAGED_BACKENDS
from absorbed_mla.serving.cpu_engine import enable_cpu_inference
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE, block_bytes
from tests.support import world
from tests.support.cases import TINY
from tests.support.harness import Setup, build_attention

enable_cpu_inference()
NAN = float("nan")
MAX_LENGTH = 256


class Host:
    """A context of one layer, and what the host does with it between two forwards.

    Args:
        layer: In evaluation mode.
        blocks: Usable ones.
    """

    def __init__(self, layer, *, blocks: int = 16, **config) -> None:
        of_cache = context_config(layer.config, layer.options)
        fields = {
            "block_size_tokens": BLOCK_SIZE,
            "buffer_size_gb": (blocks + 1) * block_bytes(of_cache, 1) / 2**30,
            "max_sequence_length": MAX_LENGTH,
            "max_requests": 8,
            "max_tokens": 256,
            **config,
        }
        self.layer = layer
        self.context = DynamicInferenceContext(of_cache, InferenceConfig(**fields))
        # Nothing may see what no token was written to.
        self.context.memory_buffer.fill_(NAN)
        self.requests: dict[int, DynamicInferenceRequest] = {}
        # Hidden states that each request has had so far.
        self.texts: dict[int, Tensor] = {}

    def add(self, number: int, length: int, chunk: int | None = None) -> None:
        """Let the next forward read a prompt, or its next ``chunk`` tokens."""
        if number not in self.requests:
            prompt = torch.zeros(length, dtype=torch.long)
            sampling = SamplingParams(num_tokens_to_generate=100, termination_id=-1)
            self.requests[number] = DynamicInferenceRequest(
                request_id=number, prompt_tokens=prompt, sampling_params=sampling
            )
        request = self.requests[number]
        self.context.add_request(request, prefill_chunk_length=chunk)
        taken = chunk or request.remaining_prompt_length
        request.remaining_prompt_tokens = request.remaining_prompt_tokens[taken:]
        request.finished_chunk_token_count += taken
        unfinished = bool(request.remaining_prompt_length)
        self.context.chunked_prefill_request_id = number if unfinished else -1

    @torch.inference_mode()
    def forward(self) -> dict[int, Tensor]:
        """Random hidden states for all new tokens; the outputs [tokens, 1, hidden] by request."""
        context = self.context
        context.initialize_attention_state()
        rows, lengths = active_rows(context), query_lengths(context)
        hidden = torch.full(
            (context.padded_active_token_count, 1, self.layer.config.hidden_size),
            NAN,
            dtype=self.layer.config.params_dtype,
            device=world.device(),
        )
        count = sum(lengths)
        hidden[:count] = torch.randn_like(hidden[:count])
        out, _ = self.layer(hidden, None, inference_context=context)
        for number, new in zip(rows, hidden[:count].split(lengths)):
            former = self.texts.get(number, new[:0])
            self.texts[number] = torch.cat((former, new))
        return dict(zip(rows, out[:count].split(lengths)))

    def end_step(self) -> None:
        """Every request goes on."""
        count = len(active_rows(self.context))
        self.context.update_requests(
            torch.ones(count, dtype=torch.uint8), torch.zeros(count).long()
        )

    def check(self, out: dict[int, Tensor]) -> None:
        """Against a forward of all that a request has had, without any context."""
        for number, got in out.items():
            with torch.no_grad():
                whole, _ = self.layer(self.texts[number].clone(), None)
            torch.testing.assert_close(got.clone(), whole[-len(got) :], rtol=1e-9, atol=1e-11)


def active_rows(context) -> list[int]:
    """Numbers of the requests that the next forward has."""
    return of_active_requests(context, "request_ids")[0]


def query_lengths(context) -> list[int]:
    """New tokens of each."""
    return of_active_requests(context, "request_query_lengths")[0]


def build(form: str = "auto", setup: dict | None = None, **config):
    """One layer in fp64; ``setup`` has further fields of ``Setup``."""
    torch.manual_seed(0)
    setup = Setup(form=form, **setup or {})
    return build_attention(TINY, setup, cache_mla_latents=True, **config).eval()


@pytest.fixture(scope="module")
def layer():
    return build()


GRAPHS = {"num_cuda_graphs": 4}
# Forwards without a cache then see what is read from one.
FP8 = {"latent_cache_dtype": "fp8", "train_on_cached_latents": True}


FORMS = {
    **{form: (form, {}, {}) for form in ("auto", "absorbed", "expanded")},
    # The other form refuses: see test_expanded_form_in_a_graph.
    **{f"{form}-graphs": (form, GRAPHS, {}) for form in ("auto", "absorbed")},
    **{f"{form}-fp8": (form, {}, FP8) for form in ("absorbed", "expanded")},
    "auto-graphs-fp8": ("auto", GRAPHS, FP8),
}


@pytest.mark.parametrize(("form", "config", "setup"), FORMS.values(), ids=FORMS)
def test_forwards_of_every_kind(form, config, setup):
    """Prefill, decode, both, and a prompt in three parts; NaN in padding and in unused slots."""
    host = Host(build(form, setup), **config)
    host.add(0, 63)
    host.add(1, 5)
    # Tokens of the third prompt that each step reads.
    for chunk in (0, 0, 70, 50, 30, 0, 0, 0):
        if chunk:
            host.add(2, 150, chunk=chunk)
        if chunk == 30:
            assert query_lengths(host.context) == [1, 1, 30]
        host.check(host.forward())
        host.end_step()
    assert len(host.texts[2]) == 153 and len(host.texts[0]) == 63 + 7


def test_paused_requests_are_no_rows(layer):
    """They come first in the host's own tables, while a prompt is still being read."""
    host = Host(layer, blocks=4, paused_buffer_size_gb=2.5 * 2**14 / 2**30)
    for number in range(2):
        host.add(number, 64)
    host.add(2, 60, chunk=30)
    host.check(host.forward())
    # Both would need a second block.
    host.end_step()
    assert host.context.paused_request_count
    host.add(2, 60)
    step = DynamicStep(host.context, 1, _initialized(host.context))
    assert len(step.lengths.keys) == len(active_rows(host.context))
    assert (step.lengths.queries[-1], step.lengths.keys[-1]) == (30, 60)
    host.check(host.forward())


def _initialized(context) -> int:
    context.initialize_attention_state()
    return context.padded_active_token_count


class TestTables:
    def step(self, layer, **config):
        host = Host(layer, **config)
        host.add(0, 63)
        host.add(1, 5)
        return DynamicStep(host.context, 1, _initialized(host.context))

    def test_rows(self, layer):
        step = self.step(layer)
        # The host pads rows to a multiple of four.
        assert step.rows.query_lengths.tolist() == [63, 5, 0, 0]
        assert step.rows.query_starts.tolist() == [0, 63, 68, 68]
        assert step.rows.kv_lengths.tolist() == [63, 5, 0, 0]
        assert (step.rows.max_query_length, step.rows.max_kv_length) == (63, 63)
        assert step.rows.block_table.shape == (4, MAX_LENGTH // BLOCK_SIZE)
        assert (step.lengths.queries, step.lengths.keys) == ((63, 5), (63, 5))

    def test_graph(self, layer):
        """Serves every batch of its size: only the host's bounds are known."""
        step = self.step(layer, **GRAPHS)
        assert step.lengths is None
        assert step.rows.max_kv_length == MAX_LENGTH
        assert step.rows.max_query_length == len(step.positions())

    def test_same_tables_for_every_forward(self, layer):
        """A captured graph reads where it was captured."""
        host = Host(layer, **GRAPHS)
        host.add(0, 63)
        addresses = []
        for _ in range(3):
            host.forward()
            host.end_step()
            rows = DynamicStep(host.context, 1, _initialized(host.context)).rows
            tables = (rows.query_starts, rows.query_lengths, rows.kv_lengths, rows.block_table)
            addresses.append([table.data_ptr() for table in tables])
        assert addresses[0] == addresses[1] == addresses[2]


class Captured(TorchFunctionMode):
    """Refuses what a GPU refuses while a graph is captured: the host reading from it, or copying.

    On a CPU, where nothing else tells: of the calls by which PyTorch does so.
    """

    NAMES = "item tolist cpu numpy nonzero unique equal __bool__ __int__ __float__ __index__"
    FORBIDDEN = frozenset([*NAMES.split(), "tensor", "as_tensor", "masked_select", "pin_memory"])

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        assert name not in self.FORBIDDEN, f"{name} while a graph is captured"
        return function(*args, **kwargs or {})


class Kernel:
    """Stands in for a kernel that runs on a GPU."""

    name = "triton"
    rates: ClassVar = {}

    @staticmethod
    def forward(q_content, q_rope, cache, rows, scale, **_):
        return torch.zeros_like(q_content), torch.zeros_like(q_content[..., 0])


@pytest.mark.parametrize(("form", "setup"), [("auto", {}), ("absorbed", {}), ("auto", FP8)])
def test_capture(monkeypatch, form, setup):
    """Nothing between the kernels waits for the device, in prefill and in decode."""
    monkeypatch.setattr(PAGED_BACKENDS, "examine", lambda name, request: ([Kernel], {}))
    layer = build(form, setup)
    # As Megatron does: once without a graph, then captured.
    for watched in (contextlib.nullcontext, Captured):
        host = Host(layer, **GRAPHS)
        host.add(0, 63)
        host.add(1, 5)
        for step in range(2):
            tokens = _initialized(host.context)
            assert host.context.is_decode_only() == (step == 1)
            with torch.inference_mode(), watched():
                layer(_zeros(tokens), None, inference_context=host.context)
            host.end_step()


def test_capture_would_be_refused():
    with Captured(), pytest.raises(AssertionError, match="item while a graph is captured"):
        torch.zeros(1).item()


def test_layers_of_a_pipeline_stage():
    """A stage's context counts its own layers: the model's fourth is this one's first."""
    host = Host(build(), **GRAPHS)
    host.layer.layer_number, host.layer._pp_layer_offset = 4, 3
    host.add(0, 63)
    host.check(host.forward())
    assert not host.context.memory_buffer[0, :, 0].isnan().all()


@torch.no_grad()
def refuse(layer, hidden, context, match):
    with pytest.raises(ValueError, match=match):
        layer(hidden, None, inference_context=context)


def _zeros(tokens, batch=1):
    return torch.zeros(tokens, batch, TINY.hidden, dtype=torch.float64, device=world.device())


class TestRefused:
    def test_context_without_latents(self, layer):
        other = build_attention(TINY, Setup())
        context = DynamicInferenceContext(
            other.config, InferenceConfig(buffer_size_gb=0.01, max_requests=8, max_tokens=256)
        )
        hidden = _zeros(64)
        refuse(layer, hidden, context, "cache_mla_latents=True")

    def test_context_for_latents_of_another_dtype(self, layer):
        """Of a layer with an FP8 cache, and the other way round."""
        other = build(setup=FP8)
        for maker, user, wanted, held in ((layer, other, 48, 256), (other, layer, 256, 48)):
            host = Host(maker)
            host.add(0, 63)
            hidden = _zeros(_initialized(host.context))
            match = f"must hold {wanted} bytes of a token, got {held}.*latent_cache_dtype"
            refuse(user, hidden, host.context, match)

    @pytest.mark.parametrize(
        ("more", "batch", "match"),
        [(1, 1, "{0} tokens.*scheduled {1}"), (0, 2, "batch must be 1, got 2")],
    )
    def test_other_tokens_than_scheduled(self, layer, more, batch, match):
        host = Host(layer)
        host.add(0, 63)
        tokens = _initialized(host.context)
        hidden = _zeros(tokens + more, batch)
        refuse(layer, hidden, host.context, match.format(tokens + more, tokens))

    def test_expanded_form_in_a_graph(self):
        host = Host(build("expanded"), **GRAPHS)
        host.add(0, 63)
        with pytest.raises(ValueError, match="form='expanded' cannot be captured"):
            host.forward()
