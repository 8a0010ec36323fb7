"""Training steps in Megatron's CUDA graphs: every bit of the same steps from the host.

Graphs of whole iterations are refused in training, and unnoticed in generation.

Without a GPU, Megatron's own code runs with graphs that repeat PyTorch's operators.
"""

from dataclasses import replace

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import cuda_graphs

from absorbed_mla import AbsorbedMLAOptions, SamplingParams
from absorbed_mla.core_attention.backend import DETERMINISM_REQUIRED
from absorbed_mla.graph_capture import captures_attention
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.support import needs, world
from tests.support.cases import TINY, WIDE, config_for
from tests.support.engine import engine_of, generating_model, prompt
from tests.support.graphed_training import first_difference, generators_for_graphs, train
from tests.support.harness import Setup, build_attention
from tests.support.recorded_graphs import OnDevice, RecordedGraph, recorded_graphs  # noqa: F401
from tests.support.refusal import refusal

STEPS = 5 if needs.HAS_GPU else 3
RECOMPUTED = {
    "": (),
    "up": ("mla_up_proj",),
    "core": ("core_attn",),
    "both": ("mla_up_proj", "core_attn"),
}
FORMS = ("absorbed", "expanded")
recomputed = pytest.mark.parametrize("recompute", RECOMPUTED.values(), ids=RECOMPUTED)
forms = pytest.mark.parametrize("form", FORMS)


def model_fields(form: str, recompute: tuple[str, ...], mla=TINY, **fields) -> dict:
    """Arguments of ``gpt_model``, in bf16.

    In fp32 the graphs' norm, which has one more node, would sum gradients in another order.
    """
    if recompute:
        fields |= {"recompute_granularity": "selective", "recompute_modules": list(recompute)}
    config = config_for(mla, torch.bfloat16, num_layers=2, **fields)
    # A gate in one of the forms.
    gate = "headwise" if form == "expanded" else None
    options = AbsorbedMLAOptions(form=form, attention_output_gate=gate)
    spec = get_absorbed_mla_decoder_block_spec(
        config, backend=config.transformer_impl, options=options
    )
    return {"mla": mla, "spec": spec, "dtype": torch.bfloat16, **fields}


@needs.no_gpu
@forms
@recomputed
def test_recorded(recorded_graphs, monkeypatch, form, recompute):  # noqa: F811
    """The graphs hold all that a step does: the host's state is that of the captured step."""
    replays, replay = [], RecordedGraph.replay
    monkeypatch.setattr(RecordedGraph, "replay", lambda graph: replays.append(replay(graph)))
    with generators_for_graphs():
        expected = train(STEPS, **model_fields(form, recompute))
        assert not replays
        found = train(STEPS, **model_fields(form, recompute, cuda_graph_impl="local"))
    # Forward and backward of two layers, in every step but the first.
    assert len(replays) == 4 * (STEPS - 1)
    assert first_difference(found, expected) is None
    assert expected[0].loss != expected[-1].loss


@needs.no_gpu
def test_recorded_with_masks(recorded_graphs):  # noqa: F811
    """A mask is an input of the graph, whose values may change."""
    with generators_for_graphs():
        expected = train(STEPS, masked=True, **model_fields("expanded", ()))
        graphed = model_fields("expanded", (), cuda_graph_impl="local")
        assert first_difference(train(STEPS, masked=True, **graphed), expected) is None
        assert first_difference(train(STEPS, **model_fields("expanded", ())), expected)


# Implementation of graphs, of layers, and cuda_graph_modules.
ON_GPU = [
    ("local", "local", []),
    ("local", "transformer_engine", ["attn"]),
    ("transformer_engine", "transformer_engine", []),
    ("transformer_engine", "transformer_engine", ["attn"]),
]


@needs.gpu
@pytest.mark.parametrize("impl, layers, modules", ON_GPU)
@forms
@pytest.mark.parametrize("recompute", [(), ("mla_up_proj",)], ids=["", "up"])
def test_captured(monkeypatch, impl, layers, modules, form, recompute):
    # Our backends are to give the same bits again; PyTorch's operators do as they are.
    monkeypatch.setattr(torch, "get_deterministic_debug_mode", lambda: DETERMINISM_REQUIRED)
    if layers == "transformer_engine" and not HAVE_TE:
        pytest.skip("needs TransformerEngine")
    fields = {"mla": replace(WIDE, hidden=256), "transformer_impl": layers}
    plain = model_fields(form, recompute, **fields)
    graphs = {"cuda_graph_impl": impl, "cuda_graph_modules": modules}
    graphed = model_fields(form, recompute, **fields, **graphs)
    with generators_for_graphs():
        expected = train(STEPS, tokens=128, **plain)
        assert first_difference(train(STEPS, tokens=128, **plain), expected) is None, "no graph"
        found = train(STEPS, tokens=128, **graphed)
    assert first_difference(found, expected) is None


@needs.no_gpu
@pytest.mark.parametrize("q_lora_rank", [None, TINY.q_lora_rank])
@forms
@recomputed
def test_a_step_waits_for_nothing(monkeypatch, form, recompute, q_lora_rank):
    """After the first one no value is read by the host, and none is copied from it."""
    mla = replace(TINY, q_lora_rank=q_lora_rank)
    setup = Setup(form=form, recompute=recompute, dtype=torch.float32)
    attention = build_attention(mla, setup)
    x = torch.randn(9, 2, mla.hidden, requires_grad=True)

    def step() -> list[torch.Tensor]:
        x.grad = None
        attention.zero_grad(set_to_none=True)
        output, _ = attention(x, None)
        output.backward(torch.ones_like(output))
        return [output, x.grad, *(parameter.grad for parameter in attention.parameters())]

    expected = step()
    for name in ("tolist", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, _of_the_host)
    with OnDevice():
        found = step()
    monkeypatch.undo()
    assert all(map(torch.equal, found, expected))


def _of_the_host(*args, **kwargs):
    raise AssertionError("the host reads a tensor")


@needs.no_gpu
def test_on_device_notices():
    for read in (lambda x: x.sum().item(), lambda x: torch.tensor([1.0]), lambda x: x.nonzero()):
        with OnDevice(), pytest.raises(RuntimeError, match="not permitted"):
            read(torch.ones(3))


# Fields -> what the message holds.
UNCAPTURABLE = {
    "attention_dropout": (0.1, "attention_dropout=0.0 only, got 0.1"),
    "qk_clip": (True, "qk_clip=False only, got True"),
    "log_max_attention_logit": (True, "log_max_attention_logit=False only, got True"),
    "context_parallel_size": (2, "context_parallel_size=1 only, got 2"),
    "fp8": ("hybrid", "fp8=None only, got 'hybrid'"),
    "fine_grained_activation_offloading": (True, "fine_grained_activation_offloading=False only"),
    "experimental_attention_variant": ("dsa", "experimental_attention_variant=None only"),
}


def hidden_states(batch: int = 2) -> torch.Tensor:
    return torch.randn(6, batch, TINY.hidden, dtype=torch.float64, device=world.device())


@pytest.fixture
def attention():
    return build_attention(TINY, Setup(), cuda_graph_impl="transformer_engine")


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("name", UNCAPTURABLE)
def test_refused(attention, monkeypatch, name, impl):
    """In the first step that trains: graphs of inference can do all that."""
    value, message = UNCAPTURABLE[name]
    monkeypatch.setattr(attention.config, "cuda_graph_impl", impl)
    monkeypatch.setattr(attention.config, name, value)
    with refusal(f"cuda_graph_impl={impl!r}", message, "toggle_cuda_graphs"):
        attention(hidden_states(), None)
    monkeypatch.setattr(attention.config, "cuda_graph_modules", ["mlp"])
    assert not captures_attention(attention.config)


def test_refused_when_built():
    with refusal("cuda_graph_impl='transformer_engine'", "attention_dropout", "got 0.1"):
        build_attention(TINY, Setup(), cuda_graph_impl="transformer_engine", attention_dropout=0.1)


def test_recomputed_norms(attention, monkeypatch):
    monkeypatch.setattr(attention.config, "recompute_granularity", "selective")
    monkeypatch.setattr(attention.config, "recompute_modules", ["layernorm"])
    attention(hidden_states(), None)
    monkeypatch.setattr(attention.config, "cuda_graph_impl", "local")
    with refusal("'layernorm'", "recompute_modules", "got ['layernorm']"):
        attention(hidden_states(), None)


def test_packs(attention):
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    with refusal("packed_seq_params must be None", "cuda_graph_impl='transformer_engine'"):
        attention(hidden_states(batch=1), None, packed_seq_params=pack)


def test_mask_of_megatron(attention, monkeypatch):
    """A mask that Megatron captures with is not the user's, whose mask is refused."""
    x, mask = hidden_states(), torch.zeros(2, 1, 6, 6, dtype=torch.bool, device=world.device())
    mask[0, :, :, 0] = True
    with refusal("attention_mask must be None", "got a tensor of shape (2, 1, 6, 6)"):
        attention(x, mask)
    expected, _ = attention(x, None)
    monkeypatch.setattr(cuda_graphs, "_IS_GRAPH_CAPTURING", True)
    assert torch.equal(attention(x, mask)[0], expected)
    monkeypatch.undo()
    with torch.no_grad():
        assert not torch.equal(attention(x, mask)[0], expected)


WHOLE = {"cuda_graph_impl": "full_iteration", "cache_mla_latents": True}


def test_whole_iterations_of_a_layer():
    attention, x = build_attention(TINY, Setup(), **WHOLE), hidden_states()
    with torch.no_grad():
        whole, _ = attention(x.clone(), None)
        cached, _ = attention(x.clone(), None, inference_context=StaticInferenceContext(2, 8))
    torch.testing.assert_close(cached, whole, rtol=1e-12, atol=1e-12)
    with refusal("cuda_graph_impl='full_iteration'", "training", "'local'"):
        attention(x, None)
    with refusal("cuda_graph_impl='full_iteration'", "cache_mla_latents"):
        build_attention(TINY, Setup(), cuda_graph_impl="full_iteration")


def test_whole_iterations_of_an_engine():
    sampling = SamplingParams(max_tokens=4, temperature=0)
    found, expected = (
        engine_of(generating_model(**fields)).generate([prompt(6, 1)], sampling)
        for fields in (WHOLE, {})
    )
    assert found == expected
