"""Gradients as Megatron's optimizer receives them: through its DDP and finalize_model_grads.

The oracle grid sums marked gradients itself. Here Megatron decides what to sum, by marks and by
names, and a layer that is right alone can still train wrongly.
"""

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from tests import oracle
from tests.distributed.test_oracle_grid import down_projection, form, sequence_parallel
from tests.support import world
from tests.support.cases import TINY, random_weights
from tests.support.execution import OWN_TABLE_BOUND
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    parameters_by_oracle_name,
    shard_dim,
)
from tests.support.layouts import dense
from tests.support.numerics import relative_error


@sequence_parallel
@down_projection
@form
def test_optimizer_receives_the_true_gradient(sequence_parallel, down_projection, form):
    """Megatron takes any q_layernorm for ordinary attention's and sums it over TP without SP."""
    setup = Setup(sequence_parallel=sequence_parallel, down_projection=down_projection, form=form)
    layout, weights = dense(12, 2), random_weights(TINY)
    x, output_grad = layout.random_rows(TINY.hidden, 1), layout.random_rows(TINY.hidden, 2)
    truth = oracle.evaluate(
        TINY, weights, x.flatten(0, 1), output_grad.flatten(0, 1), layout.sequences, None
    )
    attention = build_attention(TINY, setup)
    load_weights(attention, TINY, setup, weights)
    model = DistributedDataParallel(
        attention.config, DistributedDataParallelConfig(), attention, disable_bucketing=True
    )
    x, output_grad = (t.to(world.device()) for t in (x, output_grad))
    if sequence_parallel:
        x, output_grad = world.own_part(x, 0), world.own_part(output_grad, 0)
    output, _ = model(x, None)
    output.backward(output_grad)
    finalize_model_grads([model])
    for name, parameter in parameters_by_oracle_name(attention, TINY).items():
        gradient, dim = parameter.main_grad, shard_dim(name, setup)
        whole = gradient if dim is None else world.gather(gradient, dim)
        error = relative_error(whole.cpu(), truth.weight_grads[name])
        assert error < OWN_TABLE_BOUND, f"{name}: relative error {error:.1e}"
