"""Kernels that draw tokens against the definition, in Triton's interpreter or on a GPU."""

import pytest
import torch

from tests.support.backends import triton_interpreter
from tests.support.combinations import thinned
from tests.support.drawing import drawn, kept, table_of

# Triton decides when a kernel is decorated.
with triton_interpreter():
    from absorbed_mla.kernels.sampling import argmax, draw
    from absorbed_mla.kernels.sampling.vocabulary_blocks import BLOCK as WHOLE
    from absorbed_mla.testing.token_probabilities import kernel_weights

pytestmark = pytest.mark.usefixtures("interpreted")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Tokens of a program: few, to have several in a small vocabulary.
BLOCK = 512
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FILTERS = {
    "none": {},
    "top-k": {"top_k": 7},
    "top-1": {"top_k": 1},
    "top-p": {"top_p": 0.6, "temperature": 1.3},
    "least-top-p": {"top_p": 1e-9},
    "most-top-p": {"top_p": 1 - 2.0**-53},
    "min-p": {"min_p": 0.1, "temperature": 0.7},
    "both": {"top_k": 40, "top_p": 0.8},
    "all": {"min_p": 0.01, "top_k": 900, "top_p": 0.95, "temperature": 2.0},
    "cold": {"temperature": 1e-30, "top_k": 5, "top_p": 0.9},
    "hot": {"temperature": 1e30, "top_k": 300, "top_p": 0.9},
    # More than there are tokens with a weight.
    "few-weights": {"top_k": 500, "temperature": 0.1},
    "few-weights-top-p": {"top_k": 600, "top_p": 0.9, "temperature": 0.1},
    "greedy": {"sampled": 0, "top_k": 3},
}


def draw_tokens(logits: torch.Tensor, numbers: torch.Tensor, *, filters: bool) -> torch.Tensor:
    return draw.draw_tokens(logits, numbers, filters=filters, block=BLOCK)


def find_most_likely(logits: torch.Tensor) -> torch.Tensor:
    return argmax.find_most_likely(logits, BLOCK)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(rows: int, vocabulary: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """As a model's: most are far below the largest; some are excluded."""
    logits = torch.randn(rows, vocabulary, generator=generator(seed)) * 3
    logits[torch.rand(rows, vocabulary, generator=generator(seed + 1)) < 0.1] = -INF
    return logits.to(DEVICE, dtype)


def numbers_of(kinds: list[dict], vocabulary: int, seed: int = 0) -> torch.Tensor:
    random = torch.rand(len(kinds), dtype=torch.float64, generator=generator(seed)).tolist()
    rows = [{**kind, "random": value} for kind, value in zip(kinds, random)]
    return table_of(rows, vocabulary, DEVICE)


def expected(logits: torch.Tensor, numbers: torch.Tensor) -> list[int]:
    weights = kernel_weights(logits, numbers).cpu()
    rows = zip(logits.cpu(), weights, numbers.t().cpu())
    return [drawn(*row) for row in rows]


@pytest.mark.parametrize("dtype", DTYPES[::2] if thinned() else DTYPES)
def test_tokens(dtype):
    """Of rows with all kinds of filters, in a vocabulary that is no multiple of anything."""
    vocabulary, kinds = BLOCK + 333, [*FILTERS.values()]
    logits = random_logits(len(kinds), vocabulary, dtype)
    numbers = numbers_of(kinds, vocabulary)
    found = draw_tokens(logits, numbers, filters=True)
    assert found.tolist() == expected(logits, numbers)


def test_blocks_of_the_real_size():
    """Among them one whose sums are the largest that there are."""
    vocabulary, kinds = WHOLE + 333, [{"top_k": 700}, {"top_p": 0.5}, {"random": 0.999}]
    logits = random_logits(3, vocabulary, torch.bfloat16)
    logits[1:] = 1.0
    numbers = numbers_of(kinds, vocabulary)
    found = draw.draw_tokens(logits, numbers, filters=True)
    assert found.tolist() == expected(logits, numbers)
    assert torch.equal(draw_tokens(logits, numbers, filters=True), found)


@pytest.mark.parametrize("vocabulary", [1, 5, BLOCK, 2 * BLOCK + 1])
def test_vocabularies(vocabulary):
    kinds = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.5}]
    logits = torch.randn(4, vocabulary, generator=generator(vocabulary)).to(DEVICE, torch.bfloat16)
    numbers = numbers_of(kinds, vocabulary)
    found = draw_tokens(logits, numbers, filters=True)
    assert found.tolist() == expected(logits, numbers)
    assert find_most_likely(logits).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["none", "all"])
def test_places(kind):
    """From the first token that is left to the last one, in proportion to the weights."""
    vocabulary, count = BLOCK + 30, 8
    logits = random_logits(1, vocabulary).expand(count, -1)
    random = [i / (count - 2) for i in range(count - 2)] + [1 - 2.0**-53, 0.5]
    rows = [{**FILTERS[kind], "random": value} for value in random]
    numbers = table_of(rows, vocabulary, DEVICE)
    found = draw_tokens(logits, numbers, filters=True).tolist()
    assert found == expected(logits, numbers)
    weights = kernel_weights(logits[:1], numbers[:, :1])[0]
    top_k, top_p = numbers[3:5, 0].tolist()
    left = sorted(kept(logits[0], weights, int(top_k), top_p))
    assert (found[0], found[-2]) == (left[0], left[-1])


def test_ties():
    """The first ones of equal tokens are left; few values, in several blocks."""
    vocabulary = BLOCK + 100
    values = torch.randint(4, (1, vocabulary), generator=generator(1)).to(DEVICE, torch.bfloat16)
    equal = torch.zeros_like(values)
    kinds = [{"top_k": k} for k in (1, 2, 90, BLOCK + 7)]
    kinds += [{"top_p": p} for p in (1e-6, 0.3, 0.9)] + [{"top_k": 180, "top_p": 0.95}]
    last = [{**kind, "random": 1 - 2.0**-53} for kind in kinds]
    numbers = table_of(last, vocabulary, DEVICE)
    for logits in (values, equal):
        rows = logits.expand(len(kinds), -1)
        assert draw_tokens(rows, numbers, filters=True).tolist() == expected(rows, numbers)
    found = draw_tokens(equal.expand(8, -1), numbers, filters=True)
    assert found[:4].tolist() == [0, 1, 89, BLOCK + 6]


def test_zeros_of_both_signs_are_equal():
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]], device=DEVICE)
    numbers = table_of([{"top_k": 2, "random": 0.9}], 4, DEVICE)
    assert draw_tokens(logits, numbers, filters=True).tolist() == [2]
    assert find_most_likely(logits).tolist() == [1]


def test_filters_that_leave_all_change_nothing():
    vocabulary = BLOCK + 50
    logits = random_logits(3, vocabulary, torch.bfloat16)
    plain = numbers_of([{}] * 3, vocabulary)
    found = draw_tokens(logits, plain, filters=False)
    assert torch.equal(draw_tokens(logits, plain, filters=True), found)
    almost = numbers_of([{"top_k": vocabulary - 1, "top_p": 1 - 2.0**-53}] * 3, vocabulary)
    assert torch.equal(draw_tokens(logits, almost, filters=True), found)
    assert found.tolist() == expected(logits, plain)


def test_the_batch_does_not_matter():
    """Alone, in another order, with other strides, in another type."""
    vocabulary, kinds = BLOCK + 9, [*FILTERS.values()]
    logits = random_logits(len(kinds), vocabulary, torch.bfloat16)
    numbers = numbers_of(kinds, vocabulary)
    together = draw_tokens(logits, numbers, filters=True)
    step = 3 if thinned() else 1
    alone = [
        draw_tokens(logits[i : i + 1], numbers[:, i : i + 1], filters=True)
        for i in range(0, len(kinds), step)
    ]
    assert torch.equal(torch.cat(alone), together[::step])
    wide = torch.full((len(kinds), vocabulary + 11), INF, dtype=logits.dtype, device=DEVICE)
    wide[:, :vocabulary] = logits
    order = torch.randperm(len(kinds), generator=generator(0))
    rows = wide.flip(0).flip(0)[order.to(DEVICE)][:, :vocabulary]
    table = numbers[:, order.to(DEVICE)].t().contiguous().t()
    found = draw_tokens(rows, table, filters=True)
    assert torch.equal(found, together[order.to(DEVICE)])
    some = draw_tokens(logits[-4:].float(), numbers[:, -4:], filters=True)
    assert torch.equal(some, together[-4:])


def test_most_likely():
    """As ``argmax``: the first of equal ones; none where the largest is NaN or infinite."""
    logits = torch.randn(7, 2 * BLOCK + 5, generator=generator(0)).to(DEVICE)
    logits[0, [BLOCK + 3, BLOCK + 4, 9]] = 50.0
    logits[1, [BLOCK, 2 * BLOCK]] = NAN
    logits[2, [7, BLOCK]] = INF
    logits[3] = -INF
    logits[4] = 0
    logits[5, :BLOCK] = -INF
    logits[6, [4, 5]] = torch.tensor([INF, -NAN], device=DEVICE)
    for dtype in DTYPES:
        own = logits.to(dtype)
        found = own.argmax(-1)
        found[[1, 2, 3, 6]] = -1
        assert torch.equal(find_most_likely(own), found)
        sampled = numbers_of([{"sampled": 0}] * 7, logits.shape[1])
        assert torch.equal(draw_tokens(own, sampled, filters=False), found)


def test_excluded_tokens_are_not_drawn():
    """Nor are those of the vocabulary's padding."""
    logits = torch.full((8, BLOCK + 20), -INF, device=DEVICE)
    logits[:, [3, BLOCK + 19]] = torch.tensor([0.0, 1.0], device=DEVICE)
    kinds = [{**kind, "random": i / 4} for kind in ({}, {"top_k": 50}) for i in range(4)]
    found = draw_tokens(logits, table_of(kinds, BLOCK + 20, DEVICE), filters=True)
    # Of the first one's probability, 0.27, 0.25 is a part.
    assert found.tolist() == [3, 3, BLOCK + 19, BLOCK + 19] * 2


def test_rows_without_a_token():
    """NaN, also one that is negative, and infinities; the others are not affected."""
    vocabulary = BLOCK + 77
    logits = torch.randn(7, vocabulary, generator=generator(0)).to(DEVICE)
    logits[0], logits[1, 5], logits[2, BLOCK + 3], logits[3] = NAN, NAN, INF, -INF
    logits[4, 3], logits[5] = -NAN, INF
    kinds = {}, {"min_p": 0.5, "top_k": 9, "top_p": 0.1}
    for i, dtype in enumerate(DTYPES):
        own = logits.to(dtype)
        for kind in kinds[i % 2 : i % 2 + 1] if thinned() else kinds:
            numbers = numbers_of([kind] * 7, vocabulary)
            for filters in (False, True):
                found = draw_tokens(own, numbers, filters=filters).tolist()
                assert found[:6] == [-1] * 6
                assert found[6:] == draw_tokens(own[6:], numbers[:, 6:], filters=filters).tolist()
                assert 0 <= found[6] < vocabulary


def test_exact_ties_at_top_p():
    """Tokens with exactly that part of the sum are enough; a little more, and one more is left."""
    logits = torch.full((8, BLOCK + 5), -INF, device=DEVICE)
    logits[:, [3, 9, BLOCK, BLOCK + 4]] = 2.0
    parts = (0.25, 0.5, 0.75, 1 - 2.0**-53)
    exact = [{"top_p": part, "random": 1 - 2.0**-53} for part in parts]
    more = [{**row, "top_p": min(row["top_p"] + 2.0**-40, 1 - 2.0**-53)} for row in exact]
    numbers = table_of([*exact, *more], BLOCK + 5, DEVICE)
    found = draw_tokens(logits, numbers, filters=True).tolist()
    assert found == [3, 9, BLOCK, BLOCK + 4, 9, BLOCK, BLOCK + 4, BLOCK + 4]


@pytest.mark.parametrize("filters", [False, True])
def test_exact_ties_at_min_p(filters):
    """A token with exactly that share is left, one with a little less is not."""
    logits = torch.full((4, BLOCK + 5), -INF, device=DEVICE)
    logits[:, 3], logits[:, BLOCK + 2] = 2.0, 1.0
    plain = table_of([{}] * 4, BLOCK + 5, DEVICE)
    # Exact: fp32 of that scale.
    share = kernel_weights(logits, plain)[0, BLOCK + 2].item() / 2**40
    assert 0.3 < share < 0.4
    least = (share, share + 2.0**-50, 1.0, share - 2.0**-50)
    rows = [{"min_p": value, "random": 1 - 2.0**-53, "top_k": 2} for value in least]
    numbers = table_of(rows, BLOCK + 5, DEVICE)
    found = draw_tokens(logits, numbers, filters=filters).tolist()
    assert found == [BLOCK + 2, 3, 3, BLOCK + 2]
    logits[:, 9] = 2.0
    assert draw_tokens(logits, numbers, filters=filters)[2].item() == 9
