"""Sparse attention of the kernels against the reference, in Triton's interpreter without a GPU."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.types import OutputGradient
from absorbed_mla.dsa.sparse_reference import latent_inputs
from absorbed_mla.registry import SPARSE_BACKENDS
from tests.support.backends import triton_interpreter
from tests.support.combinations import without
from tests.support.gluon_emulation import emulated
from tests.support.hostile import poisoned_memory
from tests.support.numerics import relative_error

pytest.importorskip("triton.experimental.gluon")

pytestmark = pytest.mark.usefixtures("interpreted")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
SCALE = 0.2

with triton_interpreter():
    from absorbed_mla.kernels.dsa import key_lists as lists_module
    from absorbed_mla.kernels.dsa import scatter_add, splits
    from absorbed_mla.kernels.dsa.key_lists import KEY_MASK, KeyLists, head_tile, key_lists


@dataclass(frozen=True)
class Case:
    """Sizes of an attention over chosen keys."""

    queries: int
    keys: int
    heads: int
    topk: int
    batch: int = 1
    content: int = 32
    rope: int = 16
    dtype: torch.dtype = torch.bfloat16
    shared: bool = False  # whether neighbours choose nearly the same keys
    with_lse: bool = False

    def selection(self) -> Tensor:
        """Ascending; the first query has no key, others fewer than topk, one has holes."""
        make = torch.Generator().manual_seed(1)
        chosen = torch.full((self.queries, self.batch, self.topk), -1, dtype=torch.int32)
        for q in range(self.queries):
            for b in range(self.batch):
                if q == 0 and self.queries > 1:
                    continue
                seed = make if not self.shared else torch.Generator().manual_seed(q // 4)
                count = max(1, min(self.topk, self.keys) - q % 3)
                keys = torch.randperm(self.keys, generator=seed)[:count].sort().values
                chosen[q, b, : len(keys)] = keys.int()
        if self.queries > 2:
            chosen[2, :, : self.topk // 2] = -1
        return chosen.to(DEVICE)

    def tensors(self) -> list[Tensor]:
        make = partial(torch.randn, generator=torch.Generator().manual_seed(2))
        shapes = (
            (self.queries, self.batch, self.heads, self.content),
            (self.queries, self.batch, self.heads, self.rope),
            (self.keys, self.batch, self.content + self.rope),
            (self.queries, self.batch, self.heads, self.content),
            (self.queries, self.batch, self.heads),
        )
        return [make(shape).to(DEVICE, self.dtype) for shape in shapes]


CASES = {
    "one_token_tiles": Case(5, 90, 64, 70, with_lse=True),
    "two_head_blocks": Case(2, 70, 128, 24, batch=2),
    "four_tokens": Case(7, 50, 16, 40, batch=2, with_lse=True),
    "four_tokens_that_share": Case(9, 150, 16, 70, shared=True),
    "two_tokens": Case(5, 80, 32, 20),
    "odd_heads": Case(6, 40, 3, 12, batch=2),
    "heads_20": Case(3, 40, 20, 12),
    "fp16": Case(5, 50, 16, 30, dtype=torch.float16),
    "fp32": Case(5, 50, 4, 30, dtype=torch.float32, with_lse=True),
    "without_rope": Case(5, 50, 16, 30, rope=0),
    "one_key": Case(4, 1, 16, 1),
    "more_than_there_are": Case(4, 20, 16, 64),
    "wide_two_blocks": Case(2, 160, 64, 150, content=512, rope=64, with_lse=True),
    "wide_union": Case(6, 90, 16, 70, batch=2, content=128, rope=64, shared=True, with_lse=True),
    "wide_odd_heads": Case(6, 140, 20, 130, content=128, rope=64),
    "several_chunks_of_columns": Case(4, 30, 16, 20, content=256, rope=64),
}


def compute(case: Case, module, tensors) -> dict[str, Tensor]:
    q_content, q_rope, kv, grad_out, grad_lse = tensors
    inputs, chosen = latent_inputs(q_content, q_rope, kv), case.selection()
    output = module.forward(inputs, chosen, SCALE)
    gradient = OutputGradient(grad_out, grad_lse if case.with_lse else None)
    found = module.backward(gradient, output, inputs, chosen, SCALE)
    dkv = torch.cat((found.k_content.squeeze(2), found.k_rope), -1)
    gradients = {"dq_content": found.q_content, "dq_rope": found.q_rope, "dkv": dkv}
    return output._asdict() | gradients


def check(case: Case, found: dict[str, Tensor]) -> None:
    """Output, LSE and perhaps gradients."""
    truth = compute(case, SPARSE_BACKENDS["reference"], [x.double() for x in case.tensors()])
    blind = truth["lse"] == -torch.inf
    assert torch.equal(found["lse"] == -torch.inf, blind)
    assert blind.any() or case.queries == 1
    assert not found["out"][blind].any()
    bound = 2 * torch.finfo(case.dtype).eps if case.dtype != torch.float32 else 1e-5
    for name, actual in found.items():
        expected = truth[name]
        if name == "lse":
            actual, expected = actual[~blind], expected[~blind]
        if expected.numel():
            assert relative_error(actual, expected) < (1e-4 if name == "lse" else bound), name


@pytest.fixture(autouse=True)
def _many_tokens(monkeypatch):
    """Few tokens share tiles, as many do."""
    monkeypatch.setattr(lists_module, "_LEAST_QUERIES", 1)


@contextlib.contextmanager
def hopper(seed: int = 0):
    """Within, the launchers' kernels run: on the GPU, or in PyTorch."""
    with contextlib.ExitStack() as stack:
        if not ON_GPU:
            for name in ("forward", "backward"):
                module = importlib.import_module(f"absorbed_mla.kernels.hopper.sparse_{name}")
                kernel = f"attend_sparse_{name}"
                stack.enter_context(emulated(module, kernel, f"sparse_{name}_kernel", seed))
        yield


SPLIT = {"triton": Case(3, 90, 3, 64), "hopper": Case(3, 260, 20, 256, content=128, rope=64)}


@pytest.mark.no_cover
@pytest.mark.parametrize("name", SPLIT)
def test_few_tokens(name, monkeypatch):
    """As in a decode step: keys in any order, split over programs, a token in each tile."""
    monkeypatch.setattr(lists_module, "_LEAST_QUERIES", 1024)
    monkeypatch.setattr(splits, "_LEAST_KEYS", SPLIT[name].topk // 4)
    case = SPLIT[name]
    assert splits.splits_for(case.queries, 1, case.heads, case.topk) == 4
    q_content, q_rope, kv, *_ = case.tensors()
    chosen = case.selection()
    order = torch.randperm(case.topk, generator=torch.Generator().manual_seed(3))
    inputs = latent_inputs(q_content, q_rope, kv), chosen[..., order].contiguous(), SCALE
    with hopper(), poisoned_memory():
        found = SPARSE_BACKENDS[name].forward(*inputs)
    check(case, found._asdict())
    assert found.out.shape == q_content.shape and found.out.dtype == q_content.dtype


@pytest.mark.parametrize("topk", [16, 512])
def test_no_tokens(topk):
    """Lists that would be split, too."""
    shapes = (0, 1, 4, 16), (0, 1, 4, 16), (5, 1, 32)
    q_content, q_rope, kv = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    chosen = torch.zeros(0, 1, topk, dtype=torch.int32)
    inputs, triton = latent_inputs(q_content, q_rope, kv), SPARSE_BACKENDS["triton"]
    found = triton.forward(inputs, chosen, SCALE)
    assert found.out.shape == q_content.shape and found.lse.shape == (0, 1, 4)
    gradient = triton.backward(OutputGradient(found.out, None), found, inputs, chosen, SCALE)
    assert len(gradient.k_content) == 5 and not gradient.k_content.any()


def test_splits_depend_on_shapes_alone():
    assert splits.splits_for(32, 1, 128, 2048) == 2
    assert splits.splits_for(32, 1, 16, 2048) == 4
    assert splits.splits_for(1, 1, 128, 2048) == 16, "128 keys in each"
    assert splits.splits_for(128, 1, 128, 2048) == splits.splits_for(4096, 1, 16, 2048) == 1
    assert splits.splits_for(32, 2, 16, 2048) == 1, "a batch is not split"
    assert splits.splits_for(1, 1, 16, 2049) == 1, "in equal parts"


@pytest.mark.parametrize(("queries", "keys"), [(1023, 8192), (4096, 2**18 + 1)])
def test_tokens_that_share_nothing_have_tiles_of_their_own(queries, keys, monkeypatch):
    monkeypatch.setattr(lists_module, "_LEAST_QUERIES", 1024)
    assert lists_module.query_tile(16, 64, queries, keys, least=64) == (64, 1, 1)
    assert lists_module.query_tile(16, 64, queries, keys, least=16) == (16, 1, 1)
    assert lists_module.query_tile(128, 64, queries, keys, least=64) == (64, 1, 2)
    assert lists_module.query_tile(16, 64, 1024, 2**18, least=64) == (16, 4, 1)


OF_HOPPER = [name for name, case in CASES.items() if case.rope == 64 and case.content >= 128]
# Cases whose keys are added up in order by Triton's kernels, too.
IN_ORDER = ("two_head_blocks", "four_tokens", "fp32", "without_rope")


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("kernels", "name", "deterministic"),
    [("triton", name, False) for name in without(CASES, *OF_HOPPER, *IN_ORDER, "two_tokens")]
    + [("triton", name, True) for name in IN_ORDER]
    + [("hopper", name, deterministic) for name in OF_HOPPER for deterministic in (False, True)],
)
def test_equals_the_reference(kernels, name, deterministic, monkeypatch):
    """Amid NaN in all memory that must be written; in several runs of tiles."""
    case = CASES[name]
    most = {"triton": 21_000, "hopper": 200_000}[kernels]
    monkeypatch.setattr(scatter_add, "_MOST_BYTES", most)
    torch.use_deterministic_algorithms(deterministic)
    with hopper(), poisoned_memory():
        found = compute(case, SPARSE_BACKENDS[kernels], case.tensors())
    check(case, found)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", OF_HOPPER)
def test_any_order(name):
    """Of roles and copies of the forward for Hopper: the same bits."""
    q_content, q_rope, kv, *_ = CASES[name].tensors()
    inputs, found = (latent_inputs(q_content, q_rope, kv), CASES[name].selection(), SCALE), []
    for seed in (0, 1):
        with hopper(seed), poisoned_memory():
            found.append(SPARSE_BACKENDS["hopper"].forward(*inputs))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("shape", "strides", "first", "found"),
    [
        ((9, 1, 64), (576, 576, 1), 512, (576, 0)),
        ((9, 1, 64), (576, 1, 1), 0, (576, 0)),
        ((9, 2, 64), (64, 640, 1), 0, (64, 640)),
        ((9, 1, 64), (584, 584, 1), 0, (64, 0)),
        ((9, 2, 64), (128, 72, 1), 0, (128, 64)),
        ((9, 2, 64), (128, 64, 1), 4, (128, 64)),
        ((1, 1, 64), (1, 1, 1), 0, (0, 0)),
    ],
    ids=["part", "batch_of_one", "batch_first", "keys", "batch", "address", "one_row"],
)
def test_rows_that_16_bytes_are_copied_of(shape, strides, first, found):
    """Else the compiler refuses the kernels: strides must be multiples of 16 elements."""
    from absorbed_mla.kernels.hopper.sparse_forward import rows_of_16_bytes

    memory = torch.arange(8000, device=DEVICE).bfloat16()
    rows = memory.as_strided(shape, strides, first)
    copied, *its = rows_of_16_bytes(rows)
    assert torch.equal(copied, rows) and tuple(its) == found
    assert copied.data_ptr() % 16 == 0


@dataclass(frozen=True)
class Parts:
    """What entries of lists give, and how often keys are chosen."""

    width: int
    tiles: int = 7
    batch: int = 1
    length: int = 12
    keys: int = 20
    head_blocks: int = 1
    tokens: int = 1
    dtype: torch.dtype = torch.float32
    sinks: int = 0  # keys that every list has
    holes: int = 0  # before all other entries

    def lists(self) -> KeyLists:
        """In any order, with holes; one list is empty."""
        make = torch.Generator().manual_seed(5)
        shape = self.tiles, self.batch, self.keys - self.sinks
        others = torch.rand(shape, generator=make).argsort(-1) + self.sinks
        entries = others[..., : self.length].int()
        entries[..., 3 : 3 + self.sinks] = torch.arange(self.sinks)
        if self.tokens > 1:
            entries += torch.randint(1, 1 << self.tokens, entries.shape, generator=make) << 27
        entries[torch.rand(entries.shape, generator=make) < (0 if self.sinks else 0.2)] = -1
        entries = torch.nn.functional.pad(entries, (self.holes, 0), value=-1)
        counts = torch.full(shape[:2], entries.shape[2], dtype=torch.int32)
        counts[0, 0] = 0
        entries, counts = entries.int().to(DEVICE), counts.to(DEVICE)
        return KeyLists(entries, counts, torch.zeros_like(counts), self.tokens)


SUMS = {
    "narrow": Parts(48, batch=2, length=8, keys=12, tokens=4, head_blocks=3),
    "odd_columns": Parts(20, keys=14, dtype=torch.bfloat16),
    "wide": Parts(576, tiles=4, batch=2, length=6, keys=10, head_blocks=2, dtype=torch.bfloat16),
    "wide_fp32": Parts(576, tiles=4, length=8, keys=12, tokens=2),
    "sinks": Parts(48, tiles=40, keys=12, length=5, sinks=2, head_blocks=2, dtype=torch.bfloat16),
    "long_lists": Parts(16, tiles=3, holes=2**15),
}


@pytest.mark.no_cover
@pytest.mark.parametrize("name", SUMS)
def test_sums_in_order(name, monkeypatch):
    """Amid NaN where nothing is written; in one run and in several of them."""
    case = SUMS[name]
    lists, found = case.lists(), []
    make = torch.Generator().manual_seed(6)
    shape = case.tiles, case.batch, lists.entries.shape[2], case.head_blocks, case.width
    given = torch.randn(shape, generator=make).to(DEVICE, case.dtype)
    place = torch.arange(shape[2], device=DEVICE)
    there = (lists.entries >= 0) & (place < lists.counts[..., None])
    given[~there] = torch.nan
    total = torch.randn(case.keys, case.batch, case.width, generator=make).to(DEVICE)
    truth = total.double()
    tile, batch, entry = there.nonzero(as_tuple=True)
    key = (lists.entries[there] & (KEY_MASK.value if case.tokens > 1 else -1)).long()
    parts = given[tile, batch, entry].double().sum(1)
    truth.view(-1, case.width).index_add_(0, key * case.batch + batch, parts)

    def write(some: slice, parts: Tensor) -> None:
        runs.append(some)
        parts.copy_(given[some].reshape(parts.shape))

    of_tile = given[0].numel() * given.element_size() + 8 * case.keys * case.batch
    few = case.tiles // 3 * of_tile
    for most in (2**31, few, few):
        monkeypatch.setattr(scatter_add, "_MOST_BYTES", most)
        runs: list[slice] = []
        found.append(total.clone())
        with poisoned_memory():
            scatter_add.add_in_order(found[-1], lists, case.head_blocks, case.dtype, write)
        assert [t for some in runs for t in range(some.start, some.stop)] == [*range(case.tiles)]
        assert (len(runs) > 2) == (most == few)
        assert relative_error(found[-1].double(), truth) < 1e-6
    assert torch.equal(found[1], found[2])


def test_parts_of_all_runs_share_a_buffer(monkeypatch):
    """Which deterministic algorithms do not fill with NaN."""
    monkeypatch.setattr(scatter_add, "_MOST_BYTES", 2 * (5 * 8 * 2 + 3 * 6))
    torch.use_deterministic_algorithms(True)
    none = torch.full((5, 1, 5), -1, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(5, 1, dtype=torch.int32, device=DEVICE)
    total, runs, filled = torch.ones(3, 1, 8, device=DEVICE), [], []

    def write(some: slice, parts: Tensor) -> None:
        runs.append((some.start, some.stop, len(parts), parts.data_ptr()))
        filled.append(torch.utils.deterministic.fill_uninitialized_memory)

    lists = KeyLists(none, counts, counts, 1)
    scatter_add.add_in_order(total, lists, 1, torch.bfloat16, write)
    assert [run[:3] for run in runs] == [(0, 2, 10), (2, 4, 10), (4, 5, 5)]
    assert len({place for *_, place in runs}) == 1
    assert all(filled), "what others allocate is filled"
    assert torch.equal(total, torch.ones_like(total))


@pytest.mark.parametrize(("programs", "found"), [(1, 792), (2, 858), (3, 880), (4, 891), (5, 792)])
def test_runs_occupy_all_multiprocessors(programs, found, monkeypatch):
    """As long as they are longer than that."""
    monkeypatch.setattr(scatter_add, "_MOST_BYTES", 900 * 10)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: mock.Mock(multi_processor_count=132)
    )
    cuda = torch.device("cuda")
    assert scatter_add.tiles_at_a_time(4096, 10, programs, cuda) == found
    assert scatter_add.tiles_at_a_time(900, 10, programs, cuda) == 900
    assert scatter_add.tiles_at_a_time(4096, 400, 1, cuda) == 22
    assert scatter_add.tiles_at_a_time(4096, 10**6, 1, cuda) == 1


@pytest.mark.parametrize("heads", [1, 3, 16, 20, 24, 32, 48, 64, 100, 128])
def test_every_head_has_a_row(heads):
    tile = head_tile(heads, 64)
    assert tile.heads * tile.tokens <= 64 and tile.heads >= 16
    assert (tile.blocks - 1) * tile.heads < heads <= tile.blocks * tile.heads


def test_union():
    """Every key once, with the bits of the tokens that have chosen it."""
    chosen = Case(7, 3000, 16, 900, batch=2, shared=True).selection()
    chosen[5] = torch.randperm(3000)[:900].sort().values.int().to(DEVICE)
    lists = key_lists(chosen, 3000, 4)
    for tile in range(2):
        for b in range(2):
            rows = chosen[4 * tile : 4 * tile + 4, b]
            keys = rows[rows >= 0].unique()
            entries = lists.entries[tile, b, : lists.counts[tile, b]]
            assert torch.equal(entries & KEY_MASK.value, keys)
            for token, row in enumerate(rows):
                seen = (entries >> 27) >> token & 1 == 1
                assert torch.equal(keys[seen], row[row >= 0])


def test_too_many_keys():
    chosen = torch.zeros(4, 1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="up to"):
        key_lists(chosen, 2**27, 4)
