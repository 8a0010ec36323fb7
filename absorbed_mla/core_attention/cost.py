"""What the two forms cost, and which one ``form="auto"`` takes."""

from __future__ import annotations

from absorbed_mla.dims import MLADims


def operations(
    form: str,
    dims: MLADims,
    *,
    query_tokens: int,
    key_tokens: int,
    pairs: int,
    training: bool,
) -> int:
    """Multiply-adds of the attention and of what a form adds to it, on one rank.

    Absorbing costs ``C (nope + v)`` for each query and head, and twice that in backward. Expanding
    costs that for each key, with k_rope handed through the product (``expansion.py``), in forward,
    again in backward because keys and values are not kept, and twice for the gradients. A pair of
    query and key costs the widths of key and value in forward; backward has five products where
    forward has two.

    Args:
        form: ``"absorbed"`` or ``"expanded"``.
        dims: Of the layer; heads of this rank count.
        query_tokens: Queries of this rank.
        key_tokens: Keys that this rank's queries see.
        pairs: Pairs of a query and a key that it sees.
        training: Whether a backward follows.
    """
    c, rope = dims.kv_lora_rank, dims.qk_rope_head_dim
    projection = c * (dims.qk_nope_head_dim + dims.v_head_dim)
    if form == "absorbed":
        key, value = c + rope, c
        projected = query_tokens * projection * (3 if training else 1)
    else:
        key, value = dims.qk_head_dim, dims.v_head_dim
        projection += rope * (c + dims.qk_head_dim)
        projected = key_tokens * projection * (4 if training else 1)
    pair = 4 * key + 3 * value if training else key + value
    return dims.num_heads_per_rank * (projected + pairs * pair)


def choose_form(dims: MLADims, *, seq_len: int, cp_size: int, causal: bool, training: bool) -> str:
    """Name of the form with fewer operations for self-attention over one sequence.

    Counted on the context-parallel rank that does most: the first one, which holds a sequence's
    last tokens too and so expands all of it.

    Args:
        dims: Of the layer.
        seq_len: Tokens of the whole sequence; of a pack, its longest.
        cp_size: Ranks the sequence is cut over.
        causal: Whether a token sees only itself and earlier tokens.
        training: Whether a backward follows.
    """
    queries = -(-seq_len // cp_size)
    pairs = queries * (seq_len + 1) // 2 if causal else queries * seq_len
    cost = {
        form: operations(
            form,
            dims,
            query_tokens=queries,
            key_tokens=seq_len,
            pairs=pairs,
            training=training,
        )
        for form in ("expanded", "absorbed")
    }
    return min(cost, key=cost.__getitem__)
