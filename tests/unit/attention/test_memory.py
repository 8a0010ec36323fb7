"""What is kept for backward, counted in elements per token and derived from the shapes.

Recomputation must save what it says. The expected numbers are sums over named tensors, so a tensor
that is kept twice shows.
"""

import weakref
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.oracle import OracleMLA
from tests.support import needs, world
from tests.support.cases import TINY, config_for
from tests.support.differentiable import attention as differentiable_attention
from tests.support.harness import Setup, build_attention
from tests.support.layouts import dense, packed

FORMS = ("absorbed", "expanded")
RECOMPUTE = [(), ("mla_up_proj",), ("core_attn",), ("mla_up_proj", "core_attn")]
SHAPES = {"q_lora": TINY, "no_q_lora": replace(TINY, q_lora_rank=None)}
BY_MIX = {"ids": lambda mix: "+".join(mix) or "none"}
BYTES = 4  # everything here is float32


class Saved:
    """Tensors that autograd keeps, for as long as it keeps them."""

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def __init__(self) -> None:
        self.boxes = weakref.WeakSet()

    def hooks(self):
        """What is saved inside the block is recorded."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box.tensor)

    def _pack(self, tensor: Tensor) -> Box:
        box = self.Box(tensor)
        self.boxes.add(box)
        return box

    def elements(self, excluded: list[Tensor]) -> float:
        """Size of all distinct storages now: discarded ones have been shrunk to nothing."""
        storages = {s._cdata: s for s in (b.tensor.untyped_storage() for b in self.boxes)}
        for tensor in excluded:
            storages.pop(tensor.untyped_storage()._cdata, None)
        return sum(s.nbytes() for s in storages.values()) / BYTES


def input_of(layout) -> Tensor:
    """A layer's input [tokens, batch, hidden]."""
    return layout.random_rows(TINY.hidden, 1).to(world.device(), torch.float32).requires_grad_()


def kept_per_token(module: nn.Module, x: Tensor, layout, *arguments, tables=()) -> float:
    """Elements that one forward keeps, parameters and rotary tables not counted."""
    saved = Saved()
    with saved.hooks():
        output = module(x, *arguments, packed_seq_params=layout.packed_seq_params(world.device()))
    count = saved.elements([*module.parameters(), *tables])
    assert output is not None  # alive until here, and the graph with it
    return count / (layout.tokens * layout.batch)


def expected_per_token(mla: OracleMLA, form: str, recompute: tuple[str, ...], thd: bool) -> int:
    """The same from the equations."""
    n, c, lq = mla.heads, mla.kv_lora_rank, mla.q_lora_rank or 0
    kept = mla.hidden  # input of the down-projections
    kept += lq + (c + mla.rope)  # their outputs, inputs of the norms
    kept += n * mla.v  # input of linear_proj
    if thd:
        kept += mla.rope  # cosines and sines gathered by position
    if "mla_up_proj" not in recompute:
        # Norms: scale, and without a fused kernel what was normalised; the up-projection's input.
        copies = 1 if world.device().type == "cpu" else 0
        kept += (1 + (1 + copies) * lq if lq else 0) + (1 + copies * c)
        kept += c + mla.rope  # [latent | rotated k_rope]
        kept += n * (mla.nope + mla.rope)  # query; keys and values never
        kept += n * (c + mla.rope) if form == "absorbed" else 0  # absorbed query, rotated part
    if "core_attn" not in recompute:
        kept += n  # LSE
        kept += n * c if form == "absorbed" else 0  # attended latent; else linear_proj's input
    return kept


@pytest.mark.parametrize("recompute", RECOMPUTE, **BY_MIX)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [dense(16, 2), packed((5, 1, 10))], ids=["sbhd", "thd"])
def test_kept_for_backward(layout, shape, form, recompute):
    mla, setup = SHAPES[shape], Setup(form=form, recompute=recompute, dtype=torch.float32)
    attention = build_attention(mla, setup)
    tables = attention.rotary.cos_sin(layout.tokens, world.device())
    for dropped in (recompute, ()):
        kept = kept_per_token(attention, input_of(layout), layout, None, tables=tables)
        assert kept == expected_per_token(mla, form, dropped, thd=layout.lengths is not None)
        # Without a backward there is nothing to save, and recomputation would only cost.
        attention.eval()


# Elements per token at DeepSeek-V3's dimensions, as the README has them.
V3 = replace(TINY, hidden=7168, heads=128, q_lora_rank=1536, kv_lora_rank=512, nope=128, rope=64)
# Rotary tables are cached by their parameters, and those made here hold no numbers: no other test
# may have the same parameters.
V3 = replace(V3, v=128, rotary_base=54321.0)
KEPT_V3 = {
    ("expanded", ()): 54_530,
    ("expanded", ("mla_up_proj",)): 25_792,
    ("expanded", ("mla_up_proj", "core_attn")): 25_664,
    ("absorbed", ()): 193_794,
    ("absorbed", ("mla_up_proj",)): 91_328,
    ("absorbed", ("mla_up_proj", "core_attn")): 25_664,
}


@needs.no_gpu
@pytest.mark.parametrize("form, recompute", KEPT_V3, ids=str)
def test_recomputation_is_worth_it(monkeypatch, form, recompute):
    """A real layer of DeepSeek-V3's size, of tensors that have storages without memory."""
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)  # fakes cannot be moved
    setup = Setup(
        form=form, recompute=recompute, dtype=torch.float32, expansion_chunk_size=V3.heads * 16
    )
    layout = dense(16, 1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        attention = build_attention(V3, setup)
        tables = attention.rotary.cos_sin(layout.tokens, world.device())
        x = mode.from_tensor(layout.random_rows(V3.hidden, 1).float()).requires_grad_()
        kept = kept_per_token(attention, x, layout, None, tables=tables)
    assert kept == KEPT_V3[form, recompute]


def test_full_recomputation_keeps_the_input_of_each_layer():
    layers, layout = 3, dense(16, 2)
    config = config_for(
        TINY,
        torch.float32,
        num_layers=layers,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local")
    block = TransformerBlock(config, spec, post_layer_norm=False).to(world.device())
    assert kept_per_token(block, input_of(layout), layout, None) == layers * TINY.hidden


class LargestOutput(TorchDispatchMode):
    """Records the most elements that any operation's result has."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


HEADS, LONG, CHUNK = 2, 1024, 64


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all_keys"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_never_holds_all_scores(causal, dropout):
    """One chunk of queries' scores is the largest tensor, forward and backward."""
    shapes = [(HEADS, 8), (HEADS, 4), (1, 8), (4,), (1, 8)]
    leaves = [torch.randn(LONG, 1, *s, device=world.device(), requires_grad=True) for s in shapes]
    index = torch.arange(LONG, device=world.device())
    rules = ScoreRules(
        0.3,
        (Span(0, LONG, 0, LONG, 0 if causal else None),),
        dropout=dropout,
        query_tokens=index,
        key_tokens=index,
        query_chunk_size=CHUNK,
    )
    with LargestOutput() as watch:
        out, lse = differentiable_attention(*leaves, rules)
        (out.sum() + lse.sum()).backward()
    assert watch.largest == HEADS * CHUNK * LONG < LONG * LONG


@pytest.mark.parametrize("recompute", [RECOMPUTE[0], RECOMPUTE[-1]], **BY_MIX)
@pytest.mark.parametrize("form", FORMS)
def test_layer_never_holds_all_scores(form, recompute):
    config = config_for(
        TINY,
        torch.float32,
        recompute_granularity="selective" if recompute else None,
        recompute_modules=list(recompute) or None,
    )
    options = AbsorbedMLAOptions(form=form, query_chunk_size=CHUNK)
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local", options=options)
    block = TransformerBlock(config, spec).to(world.device())
    x = torch.randn(LONG, 1, TINY.hidden, device=world.device(), requires_grad=True)
    with LargestOutput() as watch:
        block(x, None).sum().backward()
    assert watch.largest == TINY.heads * CHUNK * LONG < LONG * LONG
