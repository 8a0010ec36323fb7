"""mla_down_proj_fusion: one layer for both down-projections, against a layer each.

Weights get from one to the other through state dicts that are put together here, so that rows in
another order show.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from absorbed_mla import AbsorbedMLAOptions, to_standard_state_dict
from absorbed_mla.checkpoint.distributed import (
    load_model_weights,
    model_sharded_state_dict,
)
from absorbed_mla.serving.export import hf_weights
from absorbed_mla.standard_mla import get_standard_mla_layer_spec
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.distributed.whole import optimizer_states
from tests.support import needs, world
from tests.support.cases import TINY, config_for, random_weights
from tests.support.combinations import few_ranks, grid
from tests.support.engine import Request, check_generates, generating_model, prompt
from tests.support.harness import Setup, build_attention, load_weights, own_tokens
from tests.support.inference import infer_in_steps
from tests.support.layouts import dense
from tests.support.lora import with_random_lora
from tests.support.models import gpt_model, logits
from tests.support.numerics import relative_error
from tests.support.refusal import refusal
from tests.support.standard import build_standard, standard_state_dict

FUSED = "linear_qkv_down_proj.weight"
PARTS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
SEQUENCE_PARALLEL = world.size() > 1
SETUPS = [
    Setup(),
    Setup(recompute=("mla_up_proj",), form="expanded"),
    Setup(sequence_parallel=SEQUENCE_PARALLEL, recompute=("mla_up_proj",)),
    Setup(down_projection="column_parallel", recompute=("mla_up_proj",)),
    Setup(down_projection="column_parallel", sequence_parallel=SEQUENCE_PARALLEL),
]
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=lambda s: "-".join(_words(s)))


def _words(setup: Setup) -> list[str]:
    order = "sequence" if setup.sequence_parallel else "all"
    return [setup.down_projection, order, setup.form, *setup.recompute]


def fused(state: dict) -> dict:
    """A state dict of an attention, of a layer each, as one of both has it."""
    found = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    return found | {FUSED: torch.cat([found.pop(name) for name in PARTS])}


def pair(setup: Setup) -> tuple[nn.Module, nn.Module]:
    """An attention with a layer each, one with one, and the same weights."""
    separate = build_attention(TINY, setup)
    load_weights(separate, TINY, setup, random_weights(TINY))
    one = build_attention(TINY, setup, mla_down_proj_fusion=True)
    values = fused(separate.state_dict())
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            parameter.copy_(values.pop(name))
    assert not values
    return separate, one


def close(found: Tensor, expected: Tensor, bound: float = 1e-12) -> bool:
    return ((found - expected).abs().max() <= bound * expected.abs().max()).item()


@every_setup
def test_computes_what_separate_layers_do(setup):
    check_results(setup, 1e-12)


@needs.gpu_with("TransformerEngine", None if HAVE_TE else "it is not installed")
@pytest.mark.parametrize("setup", SETUPS[1:], ids=lambda s: "-".join(_words(s)))
def test_computes_what_separate_layers_do_with_transformer_engine(setup):
    """In bf16, whose rounding is 4e-3."""
    check_results(replace(setup, backend="transformer_engine", dtype=torch.bfloat16), 3e-2)


@pytest.mark.parametrize("setup", SETUPS[2:], ids=lambda s: "-".join(_words(s)))
def test_lora_of_both_parts(setup):
    """Each of the two has A and B of its own, whatever layer holds its rows."""
    check_results(setup, 1e-12, lora=True)


def check_results(setup: Setup, bound: float, lora: bool = False) -> None:
    """Output, and the gradients of the input and of every weight, as they are on each rank."""
    layout = dense(12, 2)
    rows = (layout.random_rows(TINY.hidden, seed) for seed in (1, 2))
    x, grad = (own_tokens(one, layout, setup, world.cp_group()) for one in rows)
    found = []
    for attention in pair(setup):
        if lora:
            with_random_lora(attention)
        own = x.clone().requires_grad_()
        out, _ = attention(own, None)
        out.backward(grad)
        trained = [(n, w) for n, w in attention.named_parameters() if w.requires_grad]
        grads = {name: weight.grad for name, weight in trained}
        found.append((out, own.grad, grads))
    (out, input_grad, grads), (out_of_one, input_grad_of_one, grads_of_one) = found
    assert close(out_of_one, out, bound) and close(input_grad_of_one, input_grad, bound)
    grads = grads if lora else fused(grads)
    assert set(grads_of_one) == set(grads)
    for name, expected in grads.items():
        assert close(grads_of_one[name], expected, bound), name


@every_setup
def test_gradients_are_reduced_like_those_of_separate_layers(setup):
    separate, one = pair(setup)
    weights = dict(separate.named_parameters())
    for mark in ("sequence_parallel", "tensor_model_parallel", "allreduce"):
        [of_parts] = {getattr(weights[name], mark, None) for name in PARTS}
        assert getattr(one.linear_qkv_down_proj.weight, mark, None) == of_parts


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[-1]])
def test_generates_what_separate_layers_do(setup):
    x = dense(12, 2).random_rows(TINY.hidden, 1).to(world.device())
    separate, one = (infer_in_steps(a.eval(), setup, x, (8, 4)) for a in pair(setup))
    assert close(one, separate)


@pytest.mark.parametrize("down_projection", ["duplicated", "column_parallel"])
def test_engine_generates_from_a_live_model(down_projection):
    """The tokens of whole forwards, through Megatron's dynamic context."""
    options = AbsorbedMLAOptions(down_projection=down_projection)
    made = generating_model(options, mla_down_proj_fusion=True).eval()
    check_generates(made, [Request(prompt(length, seed=length), 3) for length in (5, 20)])


@pytest.mark.parametrize("down_projection", ["duplicated", "column_parallel"])
@pytest.mark.parametrize("kind", ["standard", "standard fused", "own", "own separate"])
def test_state_dicts_of_every_layout_load(kind, down_projection):
    setup = Setup(down_projection=down_projection)
    separate, expected = pair(setup)
    standard = standard_state_dict(TINY, setup, random_weights(TINY))
    state = {
        "standard": standard,
        "standard fused": fused(standard),
        "own": expected.state_dict(),
        "own separate": separate.state_dict(),
    }[kind]
    target = build_attention(TINY, setup, mla_down_proj_fusion=True)
    target.load_state_dict(state)
    loaded = dict(target.named_parameters())
    assert loaded.keys() == dict(expected.named_parameters()).keys()
    for name, weight in expected.named_parameters():
        assert torch.equal(loaded[name], weight), name
    # And back into a layer each.
    separate.zero_grad()
    other = build_attention(TINY, setup)
    other.load_state_dict(expected.state_dict())
    for name, weight in separate.named_parameters():
        assert torch.equal(dict(other.named_parameters())[name], weight), name


def model(*, one: bool, seed: int = 0, down_projection: str = "duplicated") -> nn.Module:
    fields = {
        "num_layers": 2,
        "mla_down_proj_fusion": one,
        **world.tp_fields(),
        "activation_func": torch.nn.functional.silu,
    }
    options = AbsorbedMLAOptions(down_projection=down_projection)
    spec = get_absorbed_mla_decoder_block_spec(
        config_for(TINY, torch.float32, **fields), backend="local", options=options
    )
    return gpt_model(seed=seed, spec=spec, **fields)


@pytest.mark.parametrize("down_projection", ["duplicated", "column_parallel"])
def test_live_weights_are_those_of_separate_layers(down_projection):
    """Under Hugging Face's names, from all ranks."""
    with world.parallel(tp=world.size()):
        separate, one = (
            model(one=one, seed=one, down_projection=down_projection) for one in (False, True)
        )
        one.load_state_dict(separate.state_dict())
        expected, found = (dict(hf_weights(made)) for made in (separate, one))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@few_ranks
@grid(
    2,
    {
        "saved_fused": (True, False),
        "stacked": (True, False),
        "down_projection": ("duplicated", "column_parallel"),
    },
)
def test_distributed_checkpoints_are_those_of_separate_layers(
    saved_fused, stacked, down_projection, folder
):
    """Under the standard's names, read at another tensor-parallel size and by either."""
    size = world.size()
    with world.parallel(tp=size):
        source = model(one=saved_fused, down_projection=down_projection)
        expected = logits(source)
        entries = model_sharded_state_dict(source, non_homogeneous_layers=not stacked)
        dist_checkpointing.save(entries, str(folder))
    names = dist_checkpointing.load_tensors_metadata(str(folder))
    layer = "decoder.layers." if stacked else "decoder.layers.1."
    assert {f"{layer}self_attention.{name}" for name in PARTS} <= set(names)
    assert not any(FUSED in name for name in names)
    for tp, one in itertools.product({1, size}, (True, False)):
        with world.parallel(tp=tp):
            target = model(one=one, seed=1, down_projection=down_projection)
            load_model_weights(target, folder)
            assert relative_error(logits(target), expected) < 1e-5


def test_optimizer_states_are_those_of_separate_layers(folder):
    """Megatron's optimizer applies a parameter's entry to its states."""
    size = world.size()
    with world.parallel(tp=size):
        source = model(one=True)
        dist_checkpointing.save(optimizer_states(source), str(folder))
        separate = model(one=False, seed=1)
        loaded = dist_checkpointing.load(optimizer_states(separate), str(folder))
        separate.load_state_dict(source.state_dict())
        for name, weight in separate.named_parameters():
            assert torch.equal(loaded[name], 3 * weight.detach() + 1), name


@needs.processes(1)
class TestMegatronsOwn:
    @staticmethod
    def attention(one: bool) -> nn.Module:
        """Megatron's, of local layers."""
        found = build_standard(TINY, Setup())
        if not one:
            return found
        config = replace(found.config, mla_down_proj_fusion=True)
        spec = get_standard_mla_layer_spec(config, backend="local").submodules.self_attention
        layers = replace(spec.submodules, linear_qkv_down_proj=ColumnParallelLinear)
        fused_spec = replace(spec, module=FusedMLASelfAttention, submodules=layers)
        return build_module(fused_spec, config=config, layer_number=1).to(world.device())

    @pytest.mark.parametrize("one", [True, False])
    def test_state_dicts_go_there_and_back(self, one):
        """Strictly, and bit for bit; both compute the same."""
        _, ours = pair(Setup())
        theirs = self.attention(one)
        down = "fused" if one else "separate"
        written = to_standard_state_dict(ours.state_dict(), ours.dims, down=down)
        theirs.load_state_dict(written)
        back = build_attention(TINY, Setup(), mla_down_proj_fusion=True)
        back.load_state_dict(theirs.state_dict())
        weights = dict(back.named_parameters())
        for name, weight in ours.named_parameters():
            assert torch.equal(weights[name], weight), name
        x = dense(12, 2).random_rows(TINY.hidden, 1).to(world.device())
        assert (theirs(x, None)[0] - ours(x, None)[0]).abs().max() < 1e-6

    @pytest.mark.parametrize("one", [True, False])
    def test_distributed_checkpoints_go_there_and_back(self, one, folder):
        """With Megatron's own entries and loading on its side."""
        _, ours = pair(Setup())
        theirs = self.attention(one)
        dist_checkpointing.save(ours.sharded_state_dict(), str(folder))
        strict = dist_checkpointing.validation.StrictHandling.RAISE_ALL
        loaded = dist_checkpointing.load(theirs.sharded_state_dict(), str(folder), strict=strict)
        theirs.load_state_dict(
            {k: v for k, v in loaded.items() if not k.endswith("_extra_state")}, strict=False
        )
        x = dense(12, 2).random_rows(TINY.hidden, 1).to(world.device())
        assert (theirs(x, None)[0] - ours(x, None)[0]).abs().max() < 1e-6


@pytest.mark.parametrize("options", [{}, {"down_projection": "column_parallel"}])
def test_without_a_compressed_query_there_is_nothing_to_fuse(options):
    with refusal("mla_down_proj_fusion=True needs a q_lora_rank, got None"):
        build_attention(
            replace(TINY, q_lora_rank=None), Setup(**options), mla_down_proj_fusion=True
        )


@needs.processes(2, 4)
def test_rows_of_each_must_divide():
    """Not only those of both together."""
    mla = replace(TINY, q_lora_rank=16 * world.size() - 1, kv_lora_rank=16 * world.size() - 7)
    setup = Setup(down_projection="column_parallel")
    with refusal("down_projection='column_parallel'", "rows of linear_qkv_down_proj to divide"):
        build_attention(mla, setup, mla_down_proj_fusion=True)
