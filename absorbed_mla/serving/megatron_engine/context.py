"""Private attributes of Megatron's ``DynamicInferenceContext``, under names of this package.

The getters are as those of ``engine.py``.
"""

from __future__ import annotations

from operator import attrgetter

# (request, first, last): blocks of the prefix cache that hold these blocks of its prompt, as far as
# there are any, and the hash of the last one.
find_cached_blocks = attrgetter("_find_kv_match_count")
# The memory of all tables that the device has, uint8 [bytes], and what is copied to it.
device_tables = attrgetter("gpu_view._buf")
staged_tables = attrgetter("_cpu_bookkeeping_buf")
# The tables in host memory that are copied, by names of this package, with Megatron's: a number for
# each row, but one more for sums, and several for blocks.
STAGED_TABLES = {
    "staged_temperature": "_staging_temperature",
    "staged_top_k": "_staging_top_k",
    "staged_top_p": "_staging_top_p",
    "staged_in_prefill": "_staging_request_in_prefill_status",
    "staged_query_lengths": "_staging_request_query_lengths",
    "staged_kv_length_offsets": "_staging_request_kv_length_offsets",
    "staged_token_count": "_staging_real_token_count",
    "mha_query_lengths": "_cpu_mha_query_lengths",
    "mha_cu_query_lengths": "_cpu_mha_cu_query_seq_lengths",
    "mha_kv_lengths": "_cpu_mha_kv_seq_lengths",
    "mha_cu_kv_lengths": "_cpu_mha_cu_kv_seq_lengths",
    "mha_block_table": "_cpu_mha_block_table",
}
