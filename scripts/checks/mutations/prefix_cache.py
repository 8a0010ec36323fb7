"""Blocks of the cache that outlive requests, the process, or their place on the device."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "prefixes_of_other_options": Mutation(
        "absorbed_mla/serving/prefix_cache/fingerprint.py",
        "*_options(model), place",
        "place",
    ),
    "prefixes_in_flight_are_written": Mutation(
        "absorbed_mla/serving/prefix_cache/stored.py",
        "[b for b in cached if not allocator.block_ref_counts[b]]",
        "[b for b in cached]",
    ),
    "prefixes_of_other_tokens_are_written": Mutation(
        "absorbed_mla/serving/prefix_cache/stored.py",
        " if known.get(pair[0]) == pair[1]]",
        "]",
    ),
    "loaded_prefixes_have_no_parents": Mutation(
        "absorbed_mla/serving/prefix_cache/stored.py",
        "missing[:done], parents[:done])",
        "missing[:done], [0] * done)",
    ),
    "loaded_prefixes_begin_texts": Mutation(
        "absorbed_mla/serving/prefix_cache/stored.py",
        "*missing] if cached else [0, *missing]",
        "*missing] if False else [0, *missing]",
    ),
    "restored_blocks_are_read_from_old_copies": Mutation(
        "absorbed_mla/inference/kv_offload/blocks.py",
        "        self._ring.forget()\n",
        "",
    ),
}
