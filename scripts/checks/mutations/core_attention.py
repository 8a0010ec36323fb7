"""Core attention: forms, masks, backends."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "causal_offset": Mutation(
        "absorbed_mla/core_attention/masks/scores.py",
        "triu(chunk.causal_offset + 1)",
        "triu(chunk.causal_offset + 2)",
    ),
    "shared_dropout_seed": Mutation(
        "absorbed_mla/core_attention/masks/scores.py",
        "            self.dropout_seed,",
        "            torch.seed() % 2**62,",
    ),
    "gradient_of_shared_keys": Mutation(
        "absorbed_mla/core_attention/backends/cudnn.py",
        "_joined((a, b, a not in seen)",
        "_joined((a, b, True)",
    ),
    "merge_weights": Mutation(
        "absorbed_mla/core_attention/merge.py",
        "for x in (lse, part_lse))",
        "for x in (lse, lse))",
    ),
    "k_rope_gradient_of_one_head": Mutation(
        "absorbed_mla/core_attention/forms/expanded.py",
        "extended[:, nope:, c:].diagonal",
        "extended[:1, nope:, c:].diagonal",
    ),
    "weight_gradient_slice": Mutation(
        "absorbed_mla/core_attention/forms/expanded.py",
        "dw_k[:, :nope, :c]",
        "dw_k[:, rope:, :c]",
    ),
    "k_rope_of_another_token": Mutation(
        "absorbed_mla/core_attention/forms/expanded.py",
        "= k_rope[:, None]",
        "= k_rope.roll(1, 0)[:, None]",
    ),
    "head_chunks_not_summed": Mutation(
        "absorbed_mla/core_attention/forms/expanded.py",
        "dkv = part if dkv is None else dkv.add_(part)",
        "dkv = part",
    ),
    "slowest_form": Mutation(
        "absorbed_mla/core_attention/selection.py",
        "form, chosen = min(found.able, ",
        "form, chosen = max(found.able, ",
    ),
    "form_without_backward": Mutation(
        "absorbed_mla/core_attention/cost.py",
        "(3 * key + 2 * value) if work.training else 0",
        "0",
    ),
    "varlen_alignment": Mutation(
        "absorbed_mla/core_attention/masks/varlen.py",
        "key_end=span.key_start + queries + offset)",
        "key_end=span.key_start + queries + offset + 1)",
    ),
    "uncovered_keys": Mutation(
        "absorbed_mla/core_attention/backends/flash_attention_4.py",
        "(torch.empty_like if full else torch.zeros_like)(x)",
        "torch.empty_like(x)",
    ),
    "uncovered_queries": Mutation(
        "absorbed_mla/core_attention/backends/flash_attention_4.py",
        "make = torch.empty if rules.spans.cover(tokens) else torch.zeros\n",
        "make = torch.empty\n",
    ),
    "atomics_where_forbidden": Mutation(
        "absorbed_mla/core_attention/backends/flash_attention_4.py",
        "deterministic=torch.get_deterministic_debug_mode() == DETERMINISM_REQUIRED",
        "deterministic=False",
    ),
    "tile_offset": Mutation(
        "absorbed_mla/core_attention/masks/tiles.py",
        "offset = offset + part * tokens",
        "offset = offset + part * (tokens - 1)",
    ),
    "tiles_of_another_layout": Mutation(
        "absorbed_mla/core_attention/masks/spans.py",
        "made.tables = DerivedTables()",
        "made.tables = cls.shared = getattr(cls, 'shared', None) or DerivedTables()",
    ),
    "rows_off_cache_lines": Mutation(
        "absorbed_mla/core_attention/tiled_reference.py",
        "return F.pad(x, (0, missing)) if missing else x",
        "return x",
    ),
    "choice_of_another_layout": Mutation(
        "absorbed_mla/core_attention/module.py",
        "(layout, batch, cp_size, self.training",
        "(batch, cp_size, self.training",
    ),
    "packs_with_an_old_cudnn": Mutation(
        "absorbed_mla/core_attention/module.py",
        '"packed": layout.packed or (cp_size > 1 and batch == 1),',
        '"packed": False,',
    ),
}
