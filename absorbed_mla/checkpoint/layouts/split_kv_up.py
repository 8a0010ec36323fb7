"""K and V up-projections as two weights, as this package's attention has them."""

from absorbed_mla.checkpoint import names
from absorbed_mla.checkpoint.layout import Layout, Stack

ENTRY = Layout(
    name="split_kv_up",
    summary="K and V up-projections in two tensors",
    option="kv_up",
    value="split",
    default="combined",
    help="K and V up-projections in one tensor (default) or two",
    split=(
        Stack(
            names.KV_UP,
            (names.K_UP, names.V_UP),
            rows=lambda sizes: (sizes.qk_nope_head_dim, sizes.v_head_dim),
            columns=lambda sizes: sizes.kv_lora_rank,
            per_head=True,
        ),
    ),
)
