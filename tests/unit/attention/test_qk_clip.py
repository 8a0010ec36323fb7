"""QK-clip in one process: its formula, fp32 copies of the weights, and what is recorded when.

Layouts and parallel ranks: tests/distributed/test_qk_clip.py; kernels: tests/unit/kernels.
"""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
from megatron.core.optimizer import qk_clip as megatron_qk_clip
from torch import nn

from absorbed_mla import AbsorbedMLASelfAttention
from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.core_attention import module
from absorbed_mla.core_attention.selection import Candidates
from absorbed_mla.qk_clip import clip_qk
from tests import oracle
from tests.support import needs, world
from tests.support.adapters import wrap
from tests.support.cases import TINY, random_weights
from tests.support.fake_packages.cudnn import PlainCudnn
from tests.support.harness import Setup, build_attention, load_weights, module_table
from tests.support.hybrid import hybrid_model
from tests.support.layouts import dense
from tests.support.lora import with_random_lora
from tests.support.models import call, token_batch
from tests.support.refusal import refusal
from tests.support.standard import build_standard, load_standard

TAU = 2.5
# Above tau, below it, never positive, and what is no number.
MAX_LOGITS = torch.tensor([7.5, 2.0, -3.0, math.nan])
ONLY_CUDNN = Candidates((("expanded", PlainCudnn()),), (), False, world.device())
NO_QUERY_COMPRESSION = replace(TINY, q_lora_rank=None, latent_norm=False)
pytestmark = pytest.mark.skipif(world.size() > 1, reason="tests/distributed has more processes")


def clipping(mla=TINY, setup=None, alpha=0.5, **fields):
    """The attention with random weights, and these."""
    setup = setup or Setup(dtype=torch.float32)
    fields = {"qk_clip": True, "qk_clip_threshold": TAU, "qk_clip_alpha": alpha, **fields}
    attention = build_attention(mla, setup, **fields)
    weights = random_weights(mla)
    load_weights(attention, mla, setup, weights)
    return attention, weights


def forward(attention, tokens=6, seed=1, **arguments):
    dtype = attention.linear_proj.weight.dtype
    x = dense(tokens, 2).random_rows(TINY.hidden, seed).to(world.device(), dtype)
    attention(x, None, **arguments)
    return x


@pytest.mark.parametrize("mla", [TINY, NO_QUERY_COMPRESSION], ids=["q_lora", "no_q_lora"])
@pytest.mark.parametrize("alpha", [0.5, 0.25])
def test_equals_megatrons_on_standard_weights(mla, alpha):
    """Where Megatron's is right: every largest score is positive and a number."""
    attention, weights = clipping(mla, alpha=alpha)
    standard = build_standard(mla, Setup(dtype=torch.float32))
    load_standard(standard, mla, Setup(dtype=torch.float32), weights)
    before = copy.deepcopy(attention.state_dict())
    found = torch.tensor([7.5, 2.0, 0.5, 1e4], device=world.device())
    for layer in (attention, standard):
        layer.config.qk_clip = True
        layer.config.qk_clip_threshold, layer.config.qk_clip_alpha = TAU, alpha
        layer.core_attention.current_max_attn_logits = found.clone()
        with torch.no_grad():
            layer.clip_qk()
        assert layer.core_attention.current_max_attn_logits is None
    converted, _ = clipping(mla)
    converted.load_state_dict(standard.state_dict())
    expected, changed = converted.state_dict(), []
    for name, tensor in attention.state_dict().items():
        if torch.is_tensor(tensor):
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=0)
            changed += [] if torch.equal(tensor, before[name]) else [name]
    query = "linear_q_up_proj" if mla.q_lora_rank else "linear_q_proj"
    assert changed == [f"{query}.weight", "linear_k_up_proj.weight"]


@pytest.mark.parametrize("keeps", ["no copy", "a copy"])
def test_heads_that_are_not_clipped_keep_their_bits(keeps):
    attention, _ = clipping(setup=Setup(dtype=torch.bfloat16))
    query, key = attention.linear_q_up_proj.weight, attention.linear_k_up_proj.weight
    for weight in (query, key):
        if keeps == "a copy":
            # As in Megatron's mixed-precision optimizer.
            weight.main_param = nn.Parameter(weight.detach().float() * 1.001)
    tensors = [(w, w.detach().clone()) for w in (query, key)]
    if keeps == "a copy":
        tensors += [(w.main_param, w.main_param.detach().clone()) for w in (query, key)]
    attention.core_attention.current_max_attn_logits = MAX_LOGITS.to(world.device())
    attention.clip_qk()
    gamma = TAU / 7.5
    for tensor, before in tensors:
        heads, former = (x.detach().unflatten(0, (TINY.heads, -1)) for x in (tensor, before))
        assert torch.equal(heads[1:], former[1:])
        close = {"rtol": 2**-8 if tensor.dtype == torch.bfloat16 else 1e-6, "atol": 0}
        nope = former[0, : TINY.nope] * gamma**0.5
        torch.testing.assert_close(heads[0, : TINY.nope], nope, **close)
        rope = former[0, TINY.nope :] * gamma
        torch.testing.assert_close(heads[0, TINY.nope :], rope, **close)


def test_infinity_and_never():
    """A factor of 0 would erase the head."""
    attention, _ = clipping()
    before = {name: p.detach().clone() for name, p in attention.named_parameters()}
    for values in ([math.inf] * 4, [-math.inf] * 4, [0.0] * 4, [TAU] * 4):
        attention.core_attention.current_max_attn_logits = torch.tensor(values)
        attention.clip_qk()
        for name, parameter in attention.named_parameters():
            assert torch.equal(parameter, before[name]), name


def recorded(attention) -> torch.Tensor:
    return attention.core_attention.current_max_attn_logits.cpu()


class TestRecorded:
    def expected(self, attention, weights, x):
        layout = dense(len(x), 2)
        table = module_table(attention, TINY, layout)
        rows = x.cpu().double().flatten(0, 1)
        return oracle.max_logits(TINY, weights, rows, layout.sequences, table)

    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_over_several_forwards(self, dropout):
        """As over micro-batches; not in evaluation. A probability is dropped, not its score."""
        attention, weights = clipping(setup=Setup(), attention_dropout=dropout)
        found = [self.expected(attention, weights, forward(attention, 6, seed)) for seed in (1, 2)]
        attention.eval()
        forward(attention, 40, seed=3)
        torch.testing.assert_close(recorded(attention), torch.maximum(*found), rtol=1e-9, atol=0)

    @pytest.mark.skipif(needs.HAS_GPU, reason="the mode's kernels take no widths as small")
    def test_in_batch_invariant_mode(self):
        setup = Setup(batch_invariant=True, dtype=torch.float32)
        with batch_invariant_mode():
            attention, weights = clipping(setup=setup)
            expected = self.expected(attention, weights, forward(attention))
        torch.testing.assert_close(recorded(attention).double(), expected, rtol=1e-5, atol=0)

    def test_only_for_logs(self):
        """Megatron's function, as its training loop calls it."""
        attention, weights = clipping(setup=Setup(), qk_clip=False, log_max_attention_logit=True)
        expected = self.expected(attention, weights, forward(attention))
        before = attention.linear_q_up_proj.weight.detach().clone()
        assert clip_qk(attention, log_max_only=True) == pytest.approx(float(expected.max()))
        assert attention.core_attention.current_max_attn_logits is None
        assert torch.equal(attention.linear_q_up_proj.weight, before)
        assert clip_qk(attention, log_max_only=True) == 0

    def test_exactly_only_where_it_matters(self, monkeypatch):
        """With an LSE alone: a bound below the threshold, unless scores are logged."""
        monkeypatch.setattr(module, "candidates", lambda *_: ONLY_CUDNN)
        largest, expected = {}, None
        for logs in (True, False):
            attention, weights = clipping(
                setup=Setup(form="expanded"), log_max_attention_logit=logs
            )
            attention.config.qk_clip_threshold = math.inf
            forward(attention)
            largest[logs] = recorded(attention)
            attention.core_attention.current_max_attn_logits = None
            expected = self.expected(attention, weights, forward(attention))
            attention.core_attention.current_max_attn_logits = None
            # Changed between forwards, as by a schedule.
            attention.config.qk_clip_threshold = 1e-9
            forward(attention)
            torch.testing.assert_close(recorded(attention), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(largest[True], expected, rtol=1e-6, atol=1e-6)
        assert (largest[False] > expected).all()

    def test_not_at_all(self):
        attention, _ = clipping(qk_clip=False)
        forward(attention)
        assert attention.core_attention.current_max_attn_logits is None


def wrapped(attention) -> nn.Module:
    """As in a model in Megatron's DDP around its mixed-precision module."""
    layers = nn.ModuleList([nn.ModuleDict({"self_attention": attention})])
    model = nn.ModuleDict({"decoder": nn.ModuleDict({"layers": layers})})
    return nn.ModuleDict({"module": nn.ModuleDict({"module": model})})


def test_megatrons_function():
    """It and ours clip alike."""
    results = []
    for function in (lambda m: megatron_qk_clip.clip_qk([m]), clip_qk):
        attention, _ = clipping(setup=Setup())
        forward(attention)
        largest = function(wrapped(attention))
        state = attention.linear_q_up_proj.weight.detach(), attention.linear_k_up_proj.weight
        results.append((largest, *state))
    (one, *first), (other, *second) = results
    assert one == pytest.approx(other) and one > TAU
    assert all(map(torch.equal, first, second))


def test_a_hybrid_model_with_mtp():
    """Megatron's function asks every layer of ``decoder.layers`` for an attention."""
    model = hybrid_model("+-/+-", qk_clip=True, qk_clip_threshold=1e-3)
    call(model, labels=token_batch(6))
    layers = [m for m in model.modules() if isinstance(m, AbsorbedMLASelfAttention)]
    before = [layer.linear_q_up_proj.weight.detach().clone() for layer in layers]
    assert len(layers) == 2 and clip_qk(model) > 1e-3
    assert not any(torch.equal(x.linear_q_up_proj.weight, b) for x, b in zip(layers, before))


@needs.gpu
@pytest.mark.parametrize("above", [False, True])
def test_waits_once_for_the_gpu(above):
    """However many layers there are."""
    attentions = [clipping(setup=Setup(dtype=torch.bfloat16))[0] for _ in range(3)]
    for attention in attentions:
        found = torch.full((TINY.heads,), TAU * (1.5 if above else 0.5), device=world.device())
        attention.core_attention.current_max_attn_logits = found
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            clip_qk(nn.ModuleList(attentions))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA operation" in str(one.message) for one in seen) == 1


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "forwards", "message"),
        [
            ({"qk_clip": False}, 0, "needs qk_clip=True in the config, got False"),
            ({}, 0, "needs a training forward"),
            ({"qk_clip_threshold": 0.0}, 1, "qk_clip_threshold must be positive, got 0.0"),
        ],
        ids=["without the option", "without a forward", "a threshold of nothing"],
    )
    def test_config(self, fields, forwards, message):
        attention, _ = clipping(**fields)
        for _ in range(forwards):
            forward(attention)
        with refusal(message):
            attention.clip_qk()

    @pytest.mark.parametrize("mla", [TINY, replace(TINY, q_lora_rank=None)], ids=["q_lora", "q"])
    def test_an_adapter_on_what_it_scales(self, mla):
        """Its part of the query would stay as large as it is."""
        name = "linear_q_up_proj" if mla.q_lora_rank else "linear_q_proj"
        attention, _ = clipping(mla, setup=Setup())
        wrap(attention, name)
        forward(attention)
        for clip in (attention.clip_qk, lambda: clip_qk(wrapped(attention))):
            with refusal("QK-clip", f"the weight of {name}", "LoRA has down, to_wrap.weight, up"):
                clip()
        assert clip_qk(wrapped(attention), log_max_only=True) > 0

    def test_lora_on_what_it_scales(self):
        attention, _ = clipping(setup=Setup())
        attention.config.qk_clip = False
        with_random_lora(attention, target_modules=["linear_k_up_proj"])
        attention.config.qk_clip = True
        forward(attention)
        with refusal("QK-clip scales the weight of linear_k_up_proj, but an adapter"):
            attention.clip_qk()

    def test_no_adapter_elsewhere(self):
        """What latents are made by does not matter: the score is a product of what is scaled."""
        attention, _ = clipping(setup=Setup())
        wrap(attention, "linear_q_down_proj")
        forward(attention)
        assert clip_qk(wrapped(attention)) > TAU
        forward(attention)
        assert clip_qk(wrapped(attention)) <= TAU * 1.001


def test_the_largest_score_is_held():
    """A training run that pushes scores up: with QK-clip they stay about tau, without they grow."""
    largest = {}
    for on in (True, False):
        attention, _ = clipping(qk_clip=on, log_max_attention_logit=True, qk_clip_threshold=8.0)
        optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
        seen = []
        for step in range(60):
            x = dense(8, 2).random_rows(TINY.hidden, seed=step % 3).to(world.device()).float()
            output, _ = attention(x, None)
            # Nothing bounds the output's size, so it grows, and scores with it.
            loss = -output.square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(attention.parameters(), 1.0)
            optimizer.step()
            seen.append(clip_qk(attention, log_max_only=not on))
        largest[on] = seen
    # By one step of every batch at most.
    assert max(largest[True]) < 1.15 * 8 and max(largest[False]) > 1.5 * 8
