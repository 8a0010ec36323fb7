"""Device code of the ``triton`` backward: delta, the gradients of queries and of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from absorbed_mla.kernels.triton.common import (
    LOG2_E,
    load_rows,
    narrow,
    product,
    row_sum,
    store_rows,
)


@triton.jit
def delta_kernel(
    grad_out_ptr,
    out_ptr,
    grad_lse_ptr,
    delta_ptr,
    rows,
    batch,
    heads,
    stride_do_s,
    stride_do_b,
    stride_do_n,
    stride_o_s,
    stride_o_b,
    stride_o_n,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Delta of BLOCK_M rows; a row is a head of a token."""
    # [BLOCK_M]
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < rows
    head, token = row % heads, row // heads
    index, token = token % batch, token // batch
    # [BLOCK_M, C]
    do_rows = token * stride_do_s + index * stride_do_b + head * stride_do_n
    o_rows = token * stride_o_s + index * stride_o_b + head * stride_o_n
    do = load_rows(grad_out_ptr, do_rows, valid, C).to(tl.float32)
    delta = row_sum(do * load_rows(out_ptr, o_rows, valid, C).to(tl.float32))
    if WITH_LSE:
        delta -= tl.load(grad_lse_ptr + row, mask=valid, other=0.0)
    tl.store(delta_ptr + row, delta, mask=valid)


@triton.jit
def query_kernel(
    q_content_ptr,
    q_rope_ptr,
    latent_ptr,
    k_rope_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    dq_content_ptr,
    dq_rope_ptr,
    tiles_ptr,
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
    stride_l_s,
    stride_l_b,
    stride_dqc_s,
    stride_dqc_b,
    stride_dqc_n,
    stride_dqr_s,
    stride_dqr_b,
    stride_dqr_n,
    scale,
    head_blocks,
    C: tl.constexpr,
    R: tl.constexpr,
    HB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradient of a tile of queries of HB heads, over all keys that it sees."""
    tile = tiles_ptr + (tl.program_id(0) // head_blocks).to(tl.int64) * 5
    query_start, query_end = tl.load(tile), tl.load(tile + 1)
    key_start, key_end, offset = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    batch = tl.program_id(1).to(tl.int64)

    # [BLOCK_M]; a row is a head of a token
    row = tl.arange(0, BLOCK_M)
    token = query_start + row // HB
    head = ((tl.program_id(0) % head_blocks) * HB + row % HB).to(tl.int64)
    valid = token < query_end
    last_key = row // HB + offset  # that the row sees, counted from key_start
    token = token.to(tl.int64)
    l_rows = token * stride_l_s + batch * stride_l_b + head
    lse = tl.load(lse_ptr + l_rows, mask=valid, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + l_rows, mask=valid, other=0.0)
    # [BLOCK_M, C], [BLOCK_M, R]
    qc_rows = token * stride_qc_s + batch * stride_qc_b + head * stride_qc_n
    qc = load_rows(q_content_ptr, qc_rows, valid, C)
    do_rows = token * stride_do_s + batch * stride_do_b + head * stride_do_n
    do = load_rows(grad_out_ptr, do_rows, valid, C)
    dqc = tl.full([BLOCK_M, C], 0.0, tl.float32)
    if R > 0:
        qr_rows = token * stride_qr_s + batch * stride_qr_b + head * stride_qr_n
        qr = load_rows(q_rope_ptr, qr_rows, valid, R)
        dqr = tl.full([BLOCK_M, R], 0.0, tl.float32)

    for start in range(key_start, key_end, BLOCK_N):
        # [BLOCK_N]
        key = start + tl.arange(0, BLOCK_N)
        there = key < key_end
        # [BLOCK_N, C]
        kc_rows = key.to(tl.int64) * stride_kc_s + batch * stride_kc_b
        kc = load_rows(latent_ptr, kc_rows, there, C)
        # [BLOCK_M, BLOCK_N]
        zeros = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        scores = product(qc, tl.trans(kc), zeros, PRECISION, INTERPRETED)
        if R > 0:
            kr_rows = key.to(tl.int64) * stride_kr_s + batch * stride_kr_b
            kr = load_rows(k_rope_ptr, kr_rows, there, R)
            scores = product(qr, tl.trans(kr), scores, PRECISION, INTERPRETED)
        dprobs = product(do, tl.trans(kc), zeros, PRECISION, INTERPRETED)
        seen = ((key - key_start)[None, :] <= last_key[:, None]) & there[None, :]
        probs = tl.exp2(scores * (scale * LOG2_E) - lse[:, None])
        # Not a product with 0: a hidden score may be larger than the LSE, which is -inf in a row
        # that sees nothing, and the exponential infinite.
        dscores = tl.where(seen, probs * (dprobs - delta[:, None]), 0.0)
        dscores = narrow(dscores, kc.dtype, INTERPRETED)
        dqc = product(dscores, kc, dqc, PRECISION, INTERPRETED)
        if R > 0:
            dqr = product(dscores, kr, dqr, PRECISION, INTERPRETED)

    dqc_rows = token * stride_dqc_s + batch * stride_dqc_b + head * stride_dqc_n
    store_rows(dq_content_ptr, dqc_rows, valid, dqc * scale, C, INTERPRETED)
    if R > 0:
        dqr_rows = token * stride_dqr_s + batch * stride_dqr_b + head * stride_dqr_n
        store_rows(dq_rope_ptr, dqr_rows, valid, dqr * scale, R, INTERPRETED)


@triton.jit
def key_kernel(
    q_content_ptr,
    q_rope_ptr,
    latent_ptr,
    k_rope_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    dlatent_ptr,
    dk_rope_ptr,
    tiles_ptr,
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
    stride_l_s,
    stride_l_b,
    stride_dk_p,
    stride_dk_s,
    stride_dk_b,
    scale,
    head_blocks,
    C: tl.constexpr,
    R: tl.constexpr,
    HB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradient of a tile of keys from one split of the queries, all heads."""
    tile = tiles_ptr + tl.program_id(0).to(tl.int64) * 6
    key_start, key_end = tl.load(tile), tl.load(tile + 1)
    query_start, query_end, offset = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    split, splits = tl.program_id(1), tl.num_programs(1)
    part = tl.load(tile + 5).to(tl.int64) * splits + split
    batch = tl.program_id(2).to(tl.int64)

    # [BLOCK_N]
    column = tl.arange(0, BLOCK_N)
    key = key_start + column
    there = key < key_end
    key = key.to(tl.int64)
    # [BLOCK_N, C], [BLOCK_N, R]
    kc = load_rows(latent_ptr, key * stride_kc_s + batch * stride_kc_b, there, C)
    dkc = tl.full([BLOCK_N, C], 0.0, tl.float32)
    if R > 0:
        kr = load_rows(k_rope_ptr, key * stride_kr_s + batch * stride_kr_b, there, R)
        dkr = tl.full([BLOCK_N, R], 0.0, tl.float32)
    zeros = tl.full([BLOCK_N, 2 * BLOCK_M], 0.0, tl.float32)

    # A query and the gradient of its output are loaded as two rows of one matrix: scores and dprobs
    # come out of one product then, and both gradients of the latent, as key and value, go into one.
    # [2 * BLOCK_M]
    pair = tl.arange(0, 2 * BLOCK_M)
    is_query = pair % 2 == 0
    row = tl.arange(0, BLOCK_M)
    TOKENS: tl.constexpr = BLOCK_M // HB
    blocks = (query_end - query_start + TOKENS - 1) // TOKENS * head_blocks
    # Splits take blocks in turn, so that each gets its share of the diagonal and of every head.
    for block in range(split, blocks, splits):
        # [BLOCK_M]; a row is a head of a token
        index = block // head_blocks * TOKENS + row // HB
        valid = index < query_end - query_start
        l_rows = (query_start + index).to(tl.int64) * stride_l_s + batch * stride_l_b
        l_rows += (block % head_blocks) * HB + row % HB
        lse = tl.load(lse_ptr + l_rows, mask=valid, other=0.0) * LOG2_E
        delta = tl.load(delta_ptr + l_rows, mask=valid, other=0.0)
        # [2 * BLOCK_M]
        token = query_start + block // head_blocks * TOKENS + pair // 2 // HB
        both_valid = token < query_end
        token = token.to(tl.int64)
        head = ((block % head_blocks) * HB + pair // 2 % HB).to(tl.int64)
        # [2 * BLOCK_M, C]; zero beyond the last query, where anything may lie
        qc_rows = token * stride_qc_s + batch * stride_qc_b + head * stride_qc_n
        do_rows = token * stride_do_s + batch * stride_do_b + head * stride_do_n
        pointers = tl.where(is_query, q_content_ptr + qc_rows, grad_out_ptr + do_rows)
        columns = tl.arange(0, C)
        both = tl.load(pointers[:, None] + columns[None, :], mask=both_valid[:, None], other=0.0)
        # [BLOCK_N, 2 * BLOCK_M]
        products = product(kc, tl.trans(both), zeros, PRECISION, INTERPRETED)
        if R > 0:
            qr_rows = token * stride_qr_s + batch * stride_qr_b + head * stride_qr_n
            qr = load_rows(q_rope_ptr, qr_rows, both_valid & is_query, R)
            products = product(kr, tl.trans(qr), products, PRECISION, INTERPRETED)
        # [BLOCK_N, BLOCK_M]
        scores, dprobs = tl.split(tl.reshape(products, [BLOCK_N, BLOCK_M, 2]))
        seen = (column[:, None] <= (index + offset)[None, :]) & valid[None, :]
        probs = tl.where(seen, tl.exp2(scores * (scale * LOG2_E) - lse[None, :]), 0.0)
        dscores = probs * (dprobs - delta[None, :]) * scale
        weights = tl.reshape(tl.join(dscores, probs), [BLOCK_N, 2 * BLOCK_M])
        weights = narrow(weights, kc.dtype, INTERPRETED)
        dkc = product(weights, both, dkc, PRECISION, INTERPRETED)
        if R > 0:
            dkr = product(weights, qr, dkr, PRECISION, INTERPRETED)

    dk_rows = part * stride_dk_p + key * stride_dk_s + batch * stride_dk_b
    store_rows(dlatent_ptr, dk_rows, there, dkc, C, INTERPRETED)
    if R > 0:
        store_rows(dk_rope_ptr, dk_rows, there, dkr, R, INTERPRETED)
