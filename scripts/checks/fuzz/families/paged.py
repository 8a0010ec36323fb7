"""Fuzz families of attention over a paged latent cache, bf16, fp16, FP8: Triton and Hopper."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from absorbed_mla.kernels import operators
from absorbed_mla.kernels.paged.call import PagedCall
from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Config, family
from checks.fuzz.references import attention, fp8_bytes, fp8_decoded, fp8_parts

# Pairs of a new token and a key, times heads.
_PAIRS = 2**22
# Of all requests of a case.
_KEYS = 60_000
# Kernels of every step over a cache.
_MERGE_ROWS = "kernels.paged.merge_rows._merge_rows_kernel"
STEP = tuple(f"kernels.paged.{one}._{one}_kernel" for one in ("schedule", "combine", "padding"))
# A block that there is not, where the table of blocks is not to be read.
_NO_BLOCK = 2**31 - 648


class Requests(NamedTuple):
    """New tokens and keys of each request, where they begin, and all tokens of the step."""

    queries: list[int]
    keys: list[int]
    starts: list[int]
    tokens: int


def draw_heads(draw: Draw) -> int:
    """Any number up to 130, odd ones and powers of two often."""
    most = draw.limit(130, 6)
    if draw.flag():
        return min(most, 2 ** draw.integer(0, 7))
    return draw.integer(1, most)


def _configure_triton(config: Config) -> None:
    gpu, fp8 = config.device.type == "cuda", config.flag()
    content = config.choice(16, 32, 64, 128, 256, 512, 512) if gpu else config.choice(16, 32)
    config.content, config.heads, config.fp8 = content, draw_heads(config), fp8
    config.rope = config.choice(0, 16, 32, 64, 64) if gpu else config.choice(0, 16)
    dtypes = (BF16, BF16, FP16) if fp8 or content > 128 else (BF16, FP16, FP32)
    config.dtype, config.invariant = config.choice(*dtypes), config.flag(0.3)
    config.block_size = config.choice(1, 7, 16, 64, 64, 256, config.integer(1, 100))


def _configure_hopper(config: Config, *, fp8: bool, invariant: bool) -> None:
    """A cache with FP8 rows or not; a token's bits may not depend on those beside it, or may."""
    config.fp8, config.invariant = fp8, invariant
    config.content, config.rope = config.choice(128, 256, 512, 512), config.choice(32, 64, 64)
    config.heads, config.dtype = draw_heads(config), config.choice(BF16, BF16, FP16)
    if fp8 and not invariant and config.flag():
        config.heads = config.integer(1, 32)  # tiles of few rows
    config.block_size = 16 * config.choice(1, 2, 3, 4, 4, 4, 8, 16)
    if fp8 and config.flag(0.3):
        config.block_size = config.choice(1, 7, 48, 65, config.integer(1, 100))


def draw_requests(draw: Draw, heads: int, most_keys: int) -> Requests:
    """Requests of up to ``most_keys`` keys, with tokens of no request between some."""
    number = draw.choice(1, draw.integer(0, 4), draw.integer(1, draw.limit(150, 5)))
    pairs = _PAIRS // heads // max(number, 1)
    most_keys = min(most_keys, _KEYS // max(number, 1))
    keys, queries, most_queries = [], [], draw.choice(1, draw.limit(200, 6))
    for _ in range(number):
        length = draw.length(max(1, min(most_keys, pairs)), 64, 32, 2048, least=1)
        most = max(1, min(length, pairs // length, most_queries))
        keys.append(length)
        queries.append(draw.often(min(1, most), 0, draw.length(most, 16, 4)))
    gaps = [draw.choice(0, 0, 0, draw.integer(0, 3)) for _ in range(number + 1)]
    ends = list(accumulate(map(sum, zip(queries, gaps))))
    starts = [end - length for end, length in zip(ends, queries)]
    return Requests(queries, keys, starts, (ends[-1] if ends else 0) + gaps[-1])


class Cached(NamedTuple):
    """A cache, the table of its blocks, and the keys of each request as kernels read them."""

    cache: Tensor
    table: Tensor
    keys: list[Tensor]


def draw_cache(
    draw: Draw,
    held: list[int],
    size: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    *,
    fp8: bool = False,
) -> Cached:
    """Blocks in any order, with NaN where there is no key.

    Requests have ``held`` keys in blocks of ``size`` tokens; ``widths`` are C and R.
    """
    blocks = [-(-length // size) for length in held]
    order = draw.sample(range(2 * sum(blocks) + 2), sum(blocks))
    rows = stored = draw.normal(sum(held), sum(widths), dtype=dtype)
    if fp8:
        parts = fp8_parts(rows, widths[0])
        rows, stored = fp8_decoded(*parts, dtype), fp8_bytes(*parts)
    nothing = 0xFF if fp8 else torch.nan
    extra = draw.choice(0, 16)  # a row more of each block, and columns behind each row
    shape = 2 * sum(blocks) + 2, size + bool(extra), stored.shape[-1] + extra
    cache = stored.new_full(shape, nothing)[:, :size, : stored.shape[-1]]
    entries = max(blocks, default=0) + draw.integer(1, 2)
    table = torch.full((len(held), entries), _NO_BLOCK, dtype=torch.int32)
    first_block, first_key, keys = 0, 0, []
    places = []
    for request, (length, number) in enumerate(zip(held, blocks)):
        own = order[first_block : first_block + number]
        table[request, :number] = torch.tensor(own, dtype=torch.int32)
        places += [own[p // size] * size + p % size for p in range(length)]
        keys.append(rows[first_key : first_key + length])
        first_block, first_key = first_block + number, first_key + length
    flat = torch.tensor(places, dtype=torch.int64, device=draw.device)
    cache[flat // size, flat % size] = stored
    table = table.to(draw.device, draw.choice(torch.int32, torch.int32, torch.int64))
    return Cached(cache, table, keys)


def expected(
    config: Config, q: Tensor, cached: Cached, requests: Requests, scale: float, seen_by: Callable
) -> tuple[Tensor, Tensor, Tensor]:
    """Output with its noise, and LSE, of every token; nothing for those in no request.

    ``seen_by`` says of a request's number, a slice of its tokens and its keys who sees whom.
    """
    out = torch.zeros(*q.shape[:2], config.content, dtype=torch.float64, device=q.device)
    noise, lse = torch.zeros_like(out), torch.full_like(out[..., 0], -torch.inf)
    for number, (keys, count, start) in enumerate(
        zip(cached.keys, requests.queries, requests.starts)
    ):
        if not count:
            continue
        own, k = slice(start, start + count), keys.double()[:, None, None]
        operands = q[own].double()[:, None], k, k[..., : config.content]
        found = attention(*operands, scale, seen_by(number, own, keys), config.dtype)
        out[own], noise[own] = (x[:, 0] for x in found.out)
        lse[own] = found.lse[:, 0]
    return out, noise, lse


def draw_latents(config: Config, draw: Draw, held: list[int]) -> Cached:
    """A cache of latents, see :func:`draw_cache`."""
    widths = config.content, config.rope
    return draw_cache(draw, held, config.block_size, widths, config.dtype, fp8=config.fp8)


def draw_queries(config: Config, draw: Draw, requests: Requests) -> tuple[Tensor, float]:
    """Queries of all tokens, and what multiplies the scores."""
    width, magnitude = config.content + config.rope, draw.often(1.0, 2.0, 4.0)
    q = draw.normal(requests.tokens, config.heads, width, dtype=config.dtype, magnitude=magnitude)
    return q, draw.often(1.0, 0.3) * width**-0.5


def _run(
    kernel: str, config: Config, draw: Draw, compare: Comparison, *, long: bool = False
) -> None:
    requests = draw_requests(draw, config.heads, draw.limit(9000 if long else 3000, 40))
    first, end = 0, None
    if not config.invariant and draw.flag(0.2):
        first = draw.integer(0, max(requests.keys, default=0))
        end = draw.choice(None, first + draw.integer(0, 500))
    prefixes = 0 if config.invariant or draw.flag(0.7) else draw.integer(0, len(requests.keys))
    ends = [length if end is None else min(length, end) for length in requests.keys]
    held = [max(0, length - first) for length in ends]
    cached = draw_latents(config, draw, held)
    q, scale = draw_queries(config, draw, requests)

    def seen(number: int, own: slice, keys: Tensor) -> Tensor:
        place = torch.arange(len(keys), device=q.device)[None, :] + first
        count = own.stop - own.start
        last = requests.keys[number] - count + torch.arange(count, device=q.device)[:, None]
        last = torch.full_like(last, requests.keys[number] - 1) if number < prefixes else last
        return (place <= last) if end is None else (place <= last) & (place < end)

    in_none = torch.ones(len(q), dtype=torch.bool, device=q.device)
    for start, count in zip(requests.starts, requests.queries):
        in_none[start : start + count] = False
    hidden = q.clone()
    hidden[in_none] = torch.nan
    query = [draw.amid_nan(x) for x in hidden.split((config.content, config.rope), -1)]
    call = partial(_attend, kernel, config, draw, cached, scale, (first, end), prefixes)
    out, lse = call(query, requests, slice(0, len(requests.keys)))
    wanted, noise, wanted_lse = expected(config, q, cached, requests, scale, seen)
    compare.rows("out", out, wanted, noise, config.dtype)
    compare.lse(lse, wanted_lse, config.dtype)
    alone = [i for i, count in enumerate(requests.queries) if count]
    if config.invariant and alone:
        _check_alone(call, query, requests, draw.choice(*alone), (out, lse), compare)


def _attend(kernel, config, draw, cached, scale, window, prefixes, query, requests, own):
    """One call, for some of the requests; half of the calls get their tables made before."""
    lists = requests.starts[own], requests.queries[own], requests.keys[own]
    most = [max(lists[i], default=0) + draw.choice(0, 0, 5) for i in (1, 2)]
    tables = [draw.integer_tensor(x) for x in lists]
    if not len(lists[0]):
        tables = [x.int() for x in tables]
    arguments = *query, cached.cache, *tables
    made = {}
    if draw.flag():
        how = config.invariant, None, prefixes
        call = PagedCall(*arguments, cached.table[own], *most, scale, *window, *how)
        found = operators.paged_schedule(call, kernel)
        made = dict(zip(("tiles", "starts", "token_tiles"), found))
    splits = None if config.invariant or made else draw.choice(None, None, 1, draw.integer(1, 8))
    return operators.paged_attention_forward(
        *arguments, cached.table[own], *most, scale, *window, config.invariant, splits, prefixes,
        kernel, **made,
    )  # fmt: skip


def _check_alone(call, query, requests: Requests, which: int, whole, compare: Comparison) -> None:
    """A request gets the same bits in a batch of its own."""
    start, count = requests.starts[which], requests.queries[which]
    tokens = slice(start, start + count)
    alone = requests._replace(starts=[0] * len(requests.starts))
    out, lse = call([x[tokens] for x in query], alone, slice(which, which + 1))
    compare.same("out of a request alone", out, whole[0][tokens])
    compare.same("lse of a request alone", lse, whole[1][tokens])


@family("paged-triton", "kernels.paged.forward._paged_kernel", _MERGE_ROWS, *STEP, share=1.5)
def triton(config: Config, draw: Draw, compare: Comparison) -> None:
    """Caches of all kinds."""
    _configure_triton(config)
    _run("triton", config, draw, compare)


def _hopper(name: str, *kernels: str, share: float = 1.0) -> None:
    """A family of the kernels for Hopper; where bits are invariant, requests may be long."""
    fp8, invariant = "fp8" in name, name.endswith("invariant")

    @family(name, *(f"kernels.hopper.{one}" for one in kernels), *STEP, hopper=True, share=share)
    def run(config: Config, draw: Draw, compare: Comparison) -> None:
        _configure_hopper(config, fp8=fp8, invariant=invariant)
        with perhaps_enough_tiles(draw) if invariant else nullcontext():
            _run("hopper", config, draw, compare, long=invariant)


def perhaps_enough_tiles(draw: Draw) -> AbstractContextManager:
    """In half of all draws as if tiles were enough for the device, so that none is divided."""
    from absorbed_mla.kernels.hopper import decode

    if draw.flag():
        return nullcontext()
    return mock.patch.object(decode, "_leave_some_idle", lambda *_: False)


_DECODE, _FP8 = "decode_kernel.attend_decode", "fp8_rows.attend_fp8_decode"
_PIECES = "decode_pieces_kernel.attend_decode_pieces"
_FP8_PIECES = "fp8_decode_pieces_kernel.attend_fp8_decode_pieces"
_hopper("paged-hopper", _DECODE, share=1.5)
_hopper("paged-hopper-fp8", _FP8, "few_rows_kernel.attend_few_rows", share=1.5)
_hopper("paged-hopper-invariant", _DECODE, _PIECES)
_hopper("paged-hopper-fp8-invariant", _FP8, _FP8_PIECES)
