"""Device code of the sparse attention's backward: dQ of a query tile, dKV of its top-k keys."""

from __future__ import annotations

import triton
import triton.language as tl

from absorbed_mla.kernels.dsa.tile import listed_keys, tile_rows
from absorbed_mla.kernels.triton.common import LOG2_E, load_rows, narrow, product, store_rows


@triton.jit
def backward_kernel(
    q_content_ptr,
    q_rope_ptr,
    latent_ptr,
    k_rope_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    dq_content_ptr,
    dq_rope_ptr,
    dkv_ptr,
    entries_ptr,
    counts_ptr,
    stride_qc_s,
    stride_qc_b,
    stride_qc_n,
    stride_qr_s,
    stride_qr_b,
    stride_qr_n,
    stride_kc_s,
    stride_kc_b,
    stride_kr_s,
    stride_kr_b,
    stride_do_s,
    stride_do_b,
    stride_do_n,
    first,
    queries,
    heads,
    head_blocks,
    length,
    scale,
    C: tl.constexpr,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    HB: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OF_KEYS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """What the keys of a tile get (OF_KEYS), or its dQ; see ``_Gradients.of_tiles``.

    Both at once would spill registers. Matrices of C columns are tuples of CHUNK columns each: what
    keys get is computed and sent off chunk by chunk.
    """
    batch, batches = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    tile, token, head, own, valid = tile_rows(first, queries, heads, head_blocks, TOKENS, HB)
    number = tile.to(tl.int64) * batches + batch
    list_ptr, count = entries_ptr + number * length, tl.load(counts_ptr + number)
    row = (token * batches + batch) * heads + head
    lse = tl.load(lse_ptr + row, mask=valid, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + row, mask=valid, other=0.0)
    # [rows, CHUNK] each
    qc_rows = batch * stride_qc_b + token * stride_qc_s + head * stride_qc_n
    do_rows = batch * stride_do_b + token * stride_do_s + head * stride_do_n
    qc, do, dqc = (), (), ()
    for column in tl.static_range(0, C, CHUNK):
        qc += (load_rows(q_content_ptr + column, qc_rows, valid, CHUNK),)
        do += (load_rows(grad_out_ptr + column, do_rows, valid, CHUNK),)
        dqc += (tl.full([TOKENS * HB, CHUNK], 0.0, tl.float32),)
    if R > 0:
        qr_rows = batch * stride_qr_b + token * stride_qr_s + head * stride_qr_n
        qr = load_rows(q_rope_ptr, qr_rows, valid, R)
        dqr = tl.full([TOKENS * HB, R], 0.0, tl.float32)

    for start in range(0, count, BLOCK_N):
        key, there, seen = listed_keys(list_ptr, start, count, own, TOKENS, BLOCK_N)
        scores = tl.full([TOKENS * HB, BLOCK_N], 0.0, tl.float32)
        dprobs = tl.full([TOKENS * HB, BLOCK_N], 0.0, tl.float32)
        kc_rows = batch * stride_kc_b + key * stride_kc_s
        kc = ()
        for i in tl.static_range(C // CHUNK):
            kc += (load_rows(latent_ptr + i * CHUNK, kc_rows, there, CHUNK),)
            scores = product(qc[i], tl.trans(kc[i]), scores, PRECISION, INTERPRETED)
            dprobs = product(do[i], tl.trans(kc[i]), dprobs, PRECISION, INTERPRETED)
        if R > 0:
            kr = load_rows(k_rope_ptr, batch * stride_kr_b + key * stride_kr_s, there, R)
            scores = product(qr, tl.trans(kr), scores, PRECISION, INTERPRETED)
        # Not a product with 0: a hidden score may be larger than the LSE, which is -inf in a row
        # that sees nothing, and the exponential infinite.
        probs = tl.where(seen, tl.exp2(scores * (scale * LOG2_E) - lse[:, None]), 0.0)
        dscores = narrow(probs * (dprobs - delta[:, None]) * scale, kc[0].dtype, INTERPRETED)
        probs = narrow(probs, kc[0].dtype, INTERPRETED)
        if OF_KEYS:
            if IN_ORDER:
                place = (number - first * batches) * length + start + tl.arange(0, BLOCK_N)
                place = place * head_blocks + tl.program_id(0) % head_blocks
            else:
                place = key * batches + batch
            dk_rows = place * (C + R)
            for i in tl.static_range(C // CHUNK):
                part = tl.full([BLOCK_N, CHUNK], 0.0, tl.float32)
                part = product(tl.trans(probs), do[i], part, PRECISION, INTERPRETED)
                part = product(tl.trans(dscores), qc[i], part, PRECISION, INTERPRETED)
                _send(dkv_ptr + i * CHUNK, dk_rows, there, part, CHUNK, IN_ORDER, INTERPRETED)
            if R > 0:
                part = tl.full([BLOCK_N, R], 0.0, tl.float32)
                part = product(tl.trans(dscores), qr, part, PRECISION, INTERPRETED)
                _send(dkv_ptr + C, dk_rows, there, part, R, IN_ORDER, INTERPRETED)
        else:
            old, dqc = dqc, ()
            for i in tl.static_range(C // CHUNK):
                dqc += (product(dscores, kc[i], old[i], PRECISION, INTERPRETED),)
            if R > 0:
                dqr = product(dscores, kr, dqr, PRECISION, INTERPRETED)

    if not OF_KEYS:
        for i in tl.static_range(C // CHUNK):
            store_rows(dq_content_ptr + i * CHUNK, row * C, valid, dqc[i], CHUNK, INTERPRETED)
        if R > 0:
            store_rows(dq_rope_ptr, row * R, valid, dqr, R, INTERPRETED)


@triton.jit
def _send(
    dkv_ptr,
    rows,
    there,
    part,
    WIDTH: tl.constexpr,
    IN_ORDER: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store what keys get, [BLOCK_N, WIDTH] fp32, or add it to what they have."""
    pointers = dkv_ptr + rows[:, None] + tl.arange(0, WIDTH)[None, :]
    if IN_ORDER:
        part = narrow(part, dkv_ptr.dtype.element_ty, INTERPRETED)
        tl.store(pointers, part, mask=there[:, None])
    else:
        tl.atomic_add(pointers, part, mask=there[:, None], sem="relaxed")
