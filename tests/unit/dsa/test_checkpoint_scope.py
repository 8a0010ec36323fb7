"""Each call of a checkpoint has one scope, which its recomputation enters again."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel.random import checkpoint as megatron_checkpoint
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from absorbed_mla.dsa import checkpoint_scope
from absorbed_mla.dsa.checkpoint_scope import current_scope, is_never_recomputed, scope_checkpoints

CHECKPOINTS = {
    "megatron": lambda function, *args: megatron_checkpoint(function, False, *args),
    "torch": partial(torch_checkpoint, use_reentrant=True),
}


@pytest.fixture(params=CHECKPOINTS, autouse=True)
def checkpoint(request):
    scope_checkpoints()
    yield CHECKPOINTS[request.param]
    assert current_scope() is None


class Record:
    """A function that notes in which scope it runs, and how."""

    def __init__(self, inner=None) -> None:
        self.scopes, self.never, self.inner = [], [], inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.scopes.append(current_scope())
        self.never.append(is_never_recomputed())
        x = x if self.inner is None else self.inner(x)
        self.scopes.append(current_scope())
        return x * 2


def test_both_runs(checkpoint):
    """Of two calls in flight, whose backwards come in the other order."""
    first, second = Record(), Record()
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    out, other = checkpoint(first, x), checkpoint(second, y)
    other.sum().backward()
    out.sum().backward()
    for record in (first, second):
        assert len(record.scopes) == 4 and len(set(record.scopes)) == 1
        assert record.never == [False, False]
    assert first.scopes[0] is not second.scopes[0]


def test_nested(checkpoint):
    """The innermost; in the outer one's recomputation the inner one is another call."""
    inner = Record()
    outer = Record(lambda x: checkpoint(inner, x))
    checkpoint(outer, torch.ones(2, requires_grad=True)).sum().backward()
    assert len(set(outer.scopes)) == 1
    begun, recomputed = {*inner.scopes[:2]}, {*inner.scopes[2:]}
    assert len(inner.scopes) == 6 and len(begun) == len(recomputed) == 1
    assert not begun & recomputed and not {*outer.scopes} & {*inner.scopes}


def test_without_gradients(checkpoint):
    record = Record()
    checkpoint(record, torch.ones(2))
    assert record.never == [True] and not record.scopes[0].is_recomputed


def test_errors_leave_the_scope(checkpoint):
    def fails(x):
        raise KeyError(x)

    with pytest.raises(KeyError):
        checkpoint(fails, torch.ones(2, requires_grad=True))
    assert current_scope() is None


def test_again_wraps_nothing():
    before = CheckpointFunction.forward
    scope_checkpoints()
    assert CheckpointFunction.forward is before


def test_transformer_engine(monkeypatch):
    """Where its module is loaded, its class is wrapped, which hands keywords on in backward."""

    class Function:
        @staticmethod
        def forward(ctx, run_function, distribute, kwargs, *args):
            ctx.run_function = run_function
            return run_function(*args, **kwargs)

    module = SimpleNamespace(_CheckpointFunction=Function)
    monkeypatch.setitem(sys.modules, checkpoint_scope._TE_MODULE, module)
    scope_checkpoints()
    ctx, scopes = SimpleNamespace(needs_input_grad=(False, True)), []
    Function.forward(ctx, lambda x, y: scopes.append((current_scope(), x, y)), False, {"y": 2}, 1)
    ctx.run_function(1, y=2)
    assert scopes[0] == scopes[1] and scopes[0][0].is_recomputed and scopes[0][1:] == (1, 2)


def test_transformer_engine_without_the_class(monkeypatch):
    monkeypatch.setitem(sys.modules, checkpoint_scope._TE_MODULE, SimpleNamespace())
    with pytest.raises(AttributeError, match="_CheckpointFunction"):
        scope_checkpoints()
