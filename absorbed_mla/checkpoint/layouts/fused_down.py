"""Down-projections of query and K/V as one weight, Megatron's ``mla_down_proj_fusion``."""

from absorbed_mla.checkpoint import names
from absorbed_mla.checkpoint.layout import Layout, Sizes, Stack


def _why_not(sizes: Sizes) -> str | None:
    if sizes.q_lora_rank is None:
        return "needs a model with a q_lora_rank; this one projects the query directly"
    return None


ENTRY = Layout(
    name="fused_down",
    summary="Q and KV down-projections in one tensor (mla_down_proj_fusion)",
    option="down",
    value="fused",
    default="separate",
    help="Q and KV down-projections in one tensor or two (default)",
    joined=(
        Stack(
            names.QKV_DOWN,
            (names.Q_DOWN, names.KV_DOWN),
            rows=lambda sizes: (
                sizes.q_lora_rank or 0,
                sizes.kv_lora_rank + sizes.qk_rope_head_dim,
            ),
            columns=lambda sizes: sizes.hidden_size,
        ),
    ),
    why_not=_why_not,
)
