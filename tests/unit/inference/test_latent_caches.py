"""Which cache keeps latents in a context: Megatron's two kinds, and one that a test adds."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import CachePart, RowLengths, choose_cache
from absorbed_mla.registry import LATENT_CACHES, PAGED_BACKENDS
from tests.support import world
from tests.support.cases import TINY
from tests.support.harness import Setup, build_attention
from tests.support.refusal import refusal

BACKENDS = {"paged_attention_backend": "reference", "core_attention_backend": "reference"}


class ToyContext:
    """One request; the latents of every layer lie in one growing tensor."""

    def __init__(self) -> None:
        self.latents: dict[int, Tensor] = {}


class ToyStep:
    """See ``InferenceStep``: the whole tensor is one block."""

    windowed = False
    whole_prompts = None
    cascade = None
    ranks = None
    shares = None

    def __init__(self, latents: dict[int, Tensor], layer: int, kv: Tensor) -> None:
        self.latents, self.layer = latents, layer
        self.tables = DerivedTables()
        self.first = len(latents.get(layer, ()))
        self.max_position = self.block_size = self.first + len(kv)
        self.lengths = RowLengths((len(kv),), (self.max_position,))
        table = torch.zeros(1, 1, dtype=torch.int32, device=kv.device)
        self.rows = Rows.of(self.lengths.queries, self.lengths.keys, table)

    def positions(self) -> slice:
        return slice(self.first, self.max_position)

    def pack(self, x: Tensor) -> Tensor:
        return x

    pack_queries = unpack = pack

    def write(self, kv: Tensor) -> None:
        former = self.latents.get(self.layer, kv[:0])
        self.latents[self.layer] = torch.cat((former, kv))

    def parts(self, end: int | None = None):
        yield CachePart(self.latents[self.layer].transpose(0, 1), self.rows)


class ToyCache:
    name = "toy"
    summary = "one request in one tensor"

    def why_not(self, context) -> str | None:
        return None if isinstance(context, ToyContext) else "it needs a ToyContext"

    def open(self, context, layer_number, layer_offset, kv, options, owner) -> ToyStep:
        return ToyStep(context.latents, layer_number, kv)


@torch.no_grad()
@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
def test_a_new_cache_is_one_entry(form):
    """Registered, it serves every form: prefill, a chunk, then decode, as one whole forward."""
    layer = build_attention(TINY, Setup(form=form)).eval()
    x = torch.randn(12, 1, TINY.hidden, dtype=torch.float64, device=world.device())
    whole, _ = layer(x.clone(), None)
    context = ToyContext()
    with LATENT_CACHES.registered(ToyCache()):
        steps = [layer(part.clone(), None, inference_context=context)[0] for part in split(x)]
    torch.testing.assert_close(torch.cat(steps), whole, atol=1e-12, rtol=0)
    assert context.latents[layer.layer_number].shape[0] == 12


def split(x: Tensor) -> tuple[Tensor, ...]:
    return x.split((7, 3, 1, 1))


@pytest.mark.parametrize(("static", "name"), [(True, "static"), (False, "dynamic")])
def test_megatrons_contexts(static, name):
    assert choose_cache(SimpleNamespace(is_static_batching=lambda: static)).name == name


@torch.no_grad()
def test_no_context():
    layer = build_attention(TINY, Setup()).eval()
    hidden = torch.zeros(1, 1, TINY.hidden, dtype=torch.float64, device=world.device())
    with refusal(
        "inference_context must be able to keep latents, got ToyContext",
        "dynamic: it needs a DynamicInferenceContext",
        "offloaded: it needs an OffloadingContext; static: it needs a StaticInferenceContext",
    ):
        layer(hidden, None, inference_context=ToyContext())


class TestDecode:
    """What a decode of one token does once a layer knows its context."""

    def layer(self):
        return build_attention(TINY, Setup(form="auto", **BACKENDS)).eval()

    def prefilled(self, layer) -> StaticInferenceContext:
        context = StaticInferenceContext(1, 16)
        self.forward(layer, context, 5)
        return context

    @torch.no_grad()
    def forward(self, layer, context, tokens: int) -> None:
        x = torch.randn(tokens, 1, TINY.hidden, dtype=torch.float64, device=world.device())
        layer(x, None, inference_context=context)
        context.sequence_len_offset += tokens

    def test_nothing_is_chosen_again(self, monkeypatch):
        """Neither cache nor backend, on a CPU either, until something else is requested."""
        layer = self.layer()
        context = self.prefilled(layer)
        calls = []
        for registry in (LATENT_CACHES, PAGED_BACKENDS):
            examine = registry.examine
            monkeypatch.setattr(
                registry,
                "examine",
                lambda *args, examine=examine: calls.append(args) or examine(*args),
            )
        for _ in range(3):
            self.forward(layer, context, 1)
        assert len(calls) <= 1  # the prefill may have run expanded
        calls.clear()
        self.forward(layer, StaticInferenceContext(1, 32), 1)
        assert [request.block_size for _, request in calls] == [32]
