"""Norms as part of the linear layer behind them, as TransformerEngine's layers keep them."""

from absorbed_mla.checkpoint import names
from absorbed_mla.checkpoint.layout import Layout, Rename

ENTRY = Layout(
    name="fused_norms",
    summary="norms in the linear layers behind them (TransformerEngine)",
    option="norms",
    value="fused",
    default="separate",
    help="fused into the linear layers behind them (TransformerEngine), or modules of their own; "
    "default: fused for megatron, separate for absorbed",
    renames=(
        Rename(names.Q_NORM, names.Q_NORM_FUSED),
        Rename(names.KV_NORM, names.KV_NORM_FUSED),
        # A mixture of experts keeps its norm as a module.
        Rename(names.MLP_NORM, names.MLP_NORM_FUSED, needs=names.DENSE_MLP_UP),
        # The layer's first norm is fused only together with the down-projections.
        Rename(names.INPUT_NORM, names.INPUT_NORM_FUSED, needs=names.QKV_DOWN),
    ),
    backend="transformer_engine",
    in_absorbed=True,
)
