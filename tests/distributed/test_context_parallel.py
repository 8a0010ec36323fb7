"""What context parallelism promises besides the oracle grid: masks, dropout, groups, traffic.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 2, 4.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from absorbed_mla import sequences
from benchmarks.kit.traffic import count_traffic
from tests import oracle
from tests.distributed.test_oracle_grid import FORM, form
from tests.support import needs, world
from tests.support.cases import TINY, random_weights
from tests.support.combinations import few_ranks, grid
from tests.support.execution import execute
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    named_tensors,
    own_tokens,
    run,
    worst_over_ranks,
)
from tests.support.layouts import LAYOUTS, cut_layout, cut_tokens, dense, packed
from tests.support.models import BATCH, TOKENS, gpt_model, token_batch
from tests.support.numerics import compare, relative_error
from tests.support.refusal import refusal

pytestmark = needs.processes(2, 4)
EXCHANGES = ("all_gather", "p2p")
cp_comm_type = pytest.mark.parametrize("cp_comm_type", EXCHANGES)


@pytest.fixture
def whole_world_dp():
    """All processes are data-parallel, with groups for dynamic context parallelism."""
    with world.parallel(hybrid_context_parallel=True):
        yield


MASK_TYPES = [
    (AttnMaskType.arbitrary, "rows"),
    (AttnMaskType.padding, "keys"),
    (AttnMaskType.padding_causal, "keys"),
    (AttnMaskType.causal, "rows"),
    (AttnMaskType.no_mask, None),
]


@few_ranks
@grid(
    2,
    {
        "form": FORM,
        "cp_comm_type": EXCHANGES,
        "mask": {f"{mask_type.name}-{kind}": (mask_type, kind) for mask_type, kind in MASK_TYPES},
    },
)
def test_masks(whole_world_cp, mask, cp_comm_type, form):
    """A rank brings the mask of its own queries over all keys."""
    mask_type, kind = mask
    plain = cut_layout("sbhd", world.cp_size())
    length, generator = plain.tokens, torch.Generator().manual_seed(5)
    hidden = torch.zeros(plain.batch, 1, length, length, dtype=torch.bool)
    if kind:
        rows = length if kind == "rows" else 1
        hidden |= torch.rand(plain.batch, 1, rows, length, generator=generator) < 0.3
    visible = ~hidden[:, 0]
    if mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal):
        visible &= oracle.causal(length)
    cut = cut_tokens(plain, world.cp_size(), world.cp_group().rank())
    mask = {"rows": hidden[:, :, cut], "keys": hidden[:, :, :1], None: None}[kind]
    setup = Setup(form=form, cp_comm_type=cp_comm_type, mask_type=mask_type)
    execute(TINY, setup, dense(length, plain.batch, visible), attention_mask=mask).check()


def test_a_mask_of_the_wrong_rows(whole_world_cp):
    attention = build_attention(TINY, Setup())
    x = torch.randn(4, 1, TINY.hidden, dtype=torch.float64, device=world.device())
    tokens = 4 * world.cp_size()
    mask = torch.zeros(1, 1, tokens, tokens, dtype=torch.bool, device=world.device())
    with refusal("attention_mask", f"[1 or 1, 1, 4 or 1, {tokens}]", f"{tuple(mask.shape)}"):
        attention(x, mask)


@few_ranks
@grid(2, {"layout": LAYOUTS, "form": FORM, "cp_comm_type": EXCHANGES, "window": (None, 3)})
def test_dropout_drops_the_same_pairs(layout, form, cp_comm_type, window):
    """Which probabilities are dropped does not depend on who computes them."""
    tokens = cut_layout(layout, world.size())
    x, output_grad = tokens.random_rows(TINY.hidden, 1), tokens.random_rows(TINY.hidden, 2)
    setup = Setup(form=form, cp_comm_type=cp_comm_type, recompute=("core_attn",))
    mla = replace(TINY, window=window)

    def ran(cp: int, dropout: float):
        with world.parallel(cp=cp):
            attention = build_attention(mla, setup, attention_dropout=dropout)
            load_weights(attention, mla, setup, random_weights(mla))
            tensor_parallel.model_parallel_cuda_manual_seed(7)
            return run(attention, mla, setup, tokens, x, output_grad)

    expected, found, without = ran(1, 0.4), ran(world.size(), 0.4), ran(1, 0.0)
    named = (named_tensors(mla, result) for result in (found, expected))
    worst_over_ranks(compare(*named, 1e-12)).check()
    assert relative_error(expected.output, without.output) > 0.1


class TestDynamic:
    """Groups that come with the call (Megatron's hybrid context parallelism)."""

    @few_ranks
    @grid(2, {"layout": LAYOUTS, "form": FORM, "given": ("group", "size", "both")})
    def test_group_of_the_call(self, whole_world_dp, layout, form, given):
        """The layer was built without context parallelism."""
        group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=world.size())
        assert world.cp_size() == 1
        call = {
            "cp_group": group if given != "size" else None,
            "local_cp_size": world.size() if given != "group" else None,
        }
        execute(TINY, Setup(form=form), cut_layout(layout, world.size()), cp=call).check()

    @needs.processes(4)
    def test_part_of_the_ranks(self, whole_world_dp):
        """Each half of the processes has a pack of its own."""
        tokens = cut_layout("thd_padded", 2)
        execute(TINY, Setup(), tokens, cp={"local_cp_size": 2, "cp_group": None}).check()

    def test_turned_off_for_a_call(self, whole_world_cp):
        """local_cp_size=1: every rank has whole sequences, and nothing is sent."""
        tokens = packed((5, 0, 3))
        attention = build_attention(TINY, Setup())
        x = tokens.random_rows(TINY.hidden, world.rank()).to(world.device())
        params = replace(tokens.packed_seq_params(world.device()), local_cp_size=1)
        with count_traffic() as traffic:
            actual, _ = attention(x, None, packed_seq_params=params)
        assert traffic.num_bytes == 0
        with world.parallel(cp=1):
            alone = build_attention(TINY, Setup())
            alone.load_state_dict(attention.state_dict())
            expected, _ = alone(x, None, packed_seq_params=tokens.packed_seq_params(world.device()))
        assert torch.equal(actual, expected)

    def test_a_size_without_a_group(self, whole_world_dp):
        attention = build_attention(TINY, Setup())
        params = PackedSeqParams(qkv_format="sbhd", local_cp_size=3)
        with refusal("local_cp_size is 3", "pass cp_group", "hybrid_context_parallel=True"):
            attention(
                torch.zeros(6, 1, TINY.hidden, dtype=torch.float64), None, packed_seq_params=params
            )


class TestTraffic:
    """Bytes that a rank sends, per token that it holds and rank that it sends to."""

    WIDTH = TINY.kv_lora_rank + TINY.rope

    def sent(self, setup: Setup, mla) -> list[dict[str, float]]:
        """Bytes of each operation over the context-parallel group, forward and backward."""
        tokens = cut_layout("sbhd", world.cp_size())
        attention = build_attention(mla, setup)
        x = own_tokens(
            tokens.random_rows(mla.hidden, 1), tokens, setup, world.cp_group()
        ).requires_grad_()
        attention(x, None)[0].sum().backward()  # a first call may check what others need not
        with count_traffic() as forward:
            output, _ = attention(x, None)
        with count_traffic() as gradient:
            output.sum().backward()
        per = tokens.tokens // world.cp_size() * tokens.batch * (world.cp_size() - 1)
        found: list[dict[str, float]] = []
        for traffic in (forward, gradient):
            sent: Counter[str] = Counter()
            for message in traffic.messages:
                if message.dtype != "int64":
                    sent[message.operation] += message.num_bytes
            found.append({operation: num_bytes / per for operation, num_bytes in sent.items()})
        return found

    @grid(
        2,
        {
            "form": FORM,
            "cp_comm_type": EXCHANGES,
            "heads": (4, 20),
            "dtype": (torch.bfloat16, torch.float32),
        },
    )
    def test_sent(self, whole_world_cp, heads, cp_comm_type, form, dtype):
        """The latent and k_rope, once for all heads; backward their gradient in fp32.

        Latents are sent again in backward by the ring alone.
        """
        setup = Setup(form=form, cp_comm_type=cp_comm_type, dtype=dtype)
        forward, backward = self.sent(setup, replace(TINY, heads=heads))
        latents, gradient = self.WIDTH * dtype.itemsize, self.WIDTH * 4
        if cp_comm_type == "all_gather":
            assert forward == {"all-gather": latents}
            assert backward == {"reduce-scatter": gradient}
        else:
            assert forward == {"send": latents}
            assert backward == {"send": latents + gradient}

    @pytest.mark.parametrize(
        "recompute, gathers",
        [(("mla_up_proj",), 1), (("core_attn",), 1), (("mla_up_proj", "core_attn"), 2)],
    )
    def test_recomputation_gathers_again(self, whole_world_cp, recompute, gathers):
        setup = Setup(recompute=recompute, cp_comm_type="all_gather", dtype=torch.bfloat16)
        _, sent = self.sent(setup, TINY)
        assert sent == {"all-gather": gathers * self.WIDTH * 2, "reduce-scatter": self.WIDTH * 4}

    @pytest.mark.parametrize("heads", [1, 64])
    def test_sent_by_choice(self, whole_world_cp, heads):
        """ "auto" gathers, and once more in backward where keeping it would take much memory."""
        mla = replace(TINY, heads=heads)
        forward, backward = self.sent(Setup(cp_comm_type=None, dtype=torch.bfloat16), mla)
        own = heads * (mla.nope + mla.rope + mla.v)
        again = {} if self.WIDTH * world.cp_size() <= own else {"all-gather": self.WIDTH * 2}
        assert bool(again) == (heads == 1)
        assert forward == {"all-gather": self.WIDTH * 2}
        assert backward == {**again, "reduce-scatter": self.WIDTH * 4}


class TestDisagreement:
    """Ranks with different input get one error each, not a hang, and can go on afterwards."""

    @pytest.fixture(autouse=True)
    def _nothing_known(self, whole_world_cp):
        # On a GPU a layout that a rank has passed before is not waited for.
        sequences._dense.cache_clear()
        sequences._shared.cache_clear()

    def attempt(self, tokens: int = 4, params=None, batch: int = 1) -> None:
        attention = build_attention(TINY, Setup())
        x = torch.randn(tokens, batch, TINY.hidden, dtype=torch.float64, device=world.device())
        attention(x, None, packed_seq_params=params)

    def test_number_of_tokens(self):
        size = world.cp_size()
        tokens = ", ".join(str((6 if rank == 1 else 4) * size) for rank in range(size))
        # On a GPU once: a layout that a rank has passed before is not waited for.
        for _ in range(1 if needs.HAS_GPU else 2):
            with refusal("context-parallel ranks", "tokens of all ranks", tokens):
                self.attempt(6 if world.rank() == 1 else 4)
            self.attempt()

    def test_batch(self):
        batches = ", ".join(str(3 if rank == 0 else 2) for rank in range(world.cp_size()))
        with refusal("rank by rank", "batch", batches):
            self.attempt(batch=3 if world.rank() == 0 else 2)

    def test_boundaries(self):
        chunks = 2 * world.cp_size()
        lengths = (chunks, 3 * chunks) if world.rank() else (2 * chunks, 2 * chunks)
        with refusal("rank by rank", "sequence boundaries"):
            self.attempt(8, packed(lengths).packed_seq_params(world.device()))

    def test_a_sequence_that_does_not_divide(self):
        chunks = 2 * world.cp_size()
        with refusal(f"= {chunks} equal chunks", f"has {3 * world.cp_size()} tokens"):
            self.attempt(3)


FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@few_ranks
class TestModel:
    """A model under Megatron's DDP: the reduction over dp-cp ranks is part of the gradient."""

    def gradients(self, cp: int, **changes) -> dict[str, torch.Tensor]:
        """main_grad of the loss summed over all tokens, divided by their number."""
        with world.parallel(cp=cp):
            model = gpt_model(
                dtype=torch.float64,
                context_parallel_size=cp,
                calculate_per_token_loss=True,
                **changes,
            )
            config = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
            model = DistributedDataParallel(model.config, config, model)
            tokens = token_batch()
            cut = cut_tokens(dense(TOKENS, BATCH), cp, world.cp_group().rank())
            positions = torch.arange(TOKENS, device=tokens.device).expand_as(tokens)
            labels = tokens.roll(-1, 1)
            loss = model(tokens[:, cut], positions[:, cut], None, labels=labels[:, cut])
            loss.sum().backward()
            count = torch.tensor(loss.numel(), device=loss.device)
            finalize_model_grads([model], num_tokens=count)
            return {n: p.main_grad.clone() for n, p in model.named_parameters()}

    @grid(
        2,
        {
            "form": FORM,
            "cp_comm_type": {
                "all_gather": "all_gather",
                "p2p": "p2p",
                "per_layer": list(EXCHANGES),
            },
            "full": {"": False, "full_recompute": True},
        },
    )
    def test_gradients(self, form, cp_comm_type, full):
        """Neither scaled twice nor left partial: those of the same model without it."""
        changes = {"num_layers": 2, **(FULL_RECOMPUTE if full else {})}
        expected = self.gradients(1, **changes)
        actual = self.gradients(world.size(), cp_comm_type=cp_comm_type, **changes)
        for name, gradient in expected.items():
            assert gradient.any(), name
            assert relative_error(actual[name], gradient) < 1e-11, name

    def test_a_list_of_types(self, whole_world_cp):
        """Each layer uses its own exchange."""
        sizes = {"num_layers": 2, "context_parallel_size": world.cp_size()}
        names = ["p2p", "all_gather"]
        layers = gpt_model(**sizes, cp_comm_type=names).decoder.layers
        assert [x.self_attention.context_parallel.cp_comm_type for x in layers] == names
        with refusal("cp_comm_type", "auto, all_gather, p2p", "'a2a'"):
            gpt_model(**sizes, cp_comm_type=["p2p", "a2a"])


def layer_and_input(form: str, cp_comm_type: str, recompute: tuple[str, ...] = ()):
    setup = Setup(form=form, cp_comm_type=cp_comm_type, recompute=recompute)
    x = torch.randn(4, 1, TINY.hidden, dtype=torch.float64, device=world.device())
    return build_attention(TINY, setup), x


@few_ranks
@form
@cp_comm_type
def test_backward_twice(whole_world_cp, form, cp_comm_type):
    """With retain_graph, as for two losses of one forward."""
    attention, x = layer_and_input(form, cp_comm_type)
    output, _ = attention(x.requires_grad_(), None)
    first, second = (
        torch.autograd.grad(output.sum(), [x, *attention.parameters()], retain_graph=keep)
        for keep in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@few_ranks
@grid(
    2,
    {
        "form": FORM,
        "cp_comm_type": EXCHANGES,
        "recompute": {"none": (), "mla_up_proj": ("mla_up_proj",), "core_attn": ("core_attn",)},
    },
)
def test_frozen_latents(whole_world_cp, form, cp_comm_type, recompute):
    """Training the query alone: latents get no gradient, and no rank waits for one."""
    attention, x = layer_and_input(form, cp_comm_type, recompute)
    for name, parameter in attention.named_parameters():
        parameter.requires_grad_(name.startswith("linear_q_up_proj"))
    attention(x, None)[0].sum().backward()
    grads = {n for n, p in attention.named_parameters() if p.grad is not None}
    assert grads == {"linear_q_up_proj.weight"}


@few_ranks
@form
@cp_comm_type
def test_evaluation(whole_world_cp, form, cp_comm_type):
    """Without gradients, in eval mode: the same output, and nothing pending afterwards."""
    attention, x = layer_and_input(form, cp_comm_type, ("mla_up_proj",))
    expected, _ = attention(x, None)
    with torch.no_grad():
        assert torch.equal(attention.eval()(x, None)[0], expected)
    dist.barrier()


@cp_comm_type
@torch.inference_mode()
def test_inference_is_refused(whole_world_cp, cp_comm_type):
    """Each rank would cache its own part and attend to nothing else."""
    attention = build_attention(TINY, Setup(cp_comm_type=cp_comm_type)).eval()
    x = torch.zeros(4, 1, TINY.hidden, dtype=torch.float64, device=world.device())
    context = StaticInferenceContext(1, 8)
    with refusal("inference_context", f"context_parallel_size=1, got {world.size()}"):
        attention(x, None, inference_context=context)
    assert not context.key_value_memory_dict
