"""Experts of a layer that files hold as one tensor, as ``ModelType.stacks`` declares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.lazy_tensor import LazyTensor, concat
from checkpoint_conversion.mapping import Pair, pairs
from checkpoint_conversion.model import ModelConfig


def unstacked(tensors: Mapping[str, LazyTensor], config: ModelConfig) -> dict[str, LazyTensor]:
    """Split stacked experts into the tensors of each expert, for models that stack them.

    A stack of another shape stays as it is, and is refused later as unknown.
    """
    result = dict(tensors)
    for name, experts in _stacks(config).items():
        (rows, columns), parts = experts[0].shape, len(experts[0].hugging_face)
        if name not in result or result[name].shape != (len(experts), parts * rows, columns):
            continue
        for pair, expert in zip(experts, result.pop(name).chunk(len(experts))):
            for own, one in zip(pair.hugging_face, expert.chunk(parts, dim=1)):
                result[own] = one.view(rows, columns)
    return result


def stacked(tensors: Mapping[str, LazyTensor], config: ModelConfig) -> dict[str, LazyTensor]:
    """The inverse of :func:`unstacked`.

    Raises:
        CheckpointError: If tensors of one stack differ in dtype.
    """
    members = {
        name: [one for pair in experts for one in pair.hugging_face]
        for name, experts in _stacks(config).items()
    }
    stack_of = {one: name for name, ones in members.items() for one in ones}
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        stack = stack_of.get(name)
        if stack is None:
            result[name] = tensor
        elif stack not in result:
            ones = [tensors[one] for one in members[stack]]
            result[stack] = _stack(stack, ones, len(ones) // config.num_experts)
    return result


def _stacks(config: ModelConfig) -> dict[str, list[Pair]]:
    """Full name of every stack -> the tensors of its experts."""
    stored = {one: name for name, one in config.model.stacks.items()}
    result: dict[str, list[Pair]] = {}
    for pair in pairs(config) if stored else ():
        if pair.row.hugging_face in stored:
            name = pair.prefix + stored[pair.row.hugging_face]
            result.setdefault(name, []).append(pair)
    return result


def _stack(name: str, tensors: Sequence[LazyTensor], each: int) -> LazyTensor:
    """One tensor of all experts, from ``each`` tensors per expert."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        found = " and ".join(sorted(map(str, dtypes)))
        raise CheckpointError(f"{name} would be {found}; --dtype makes its experts the same")
    rows, columns = tensors[0].shape
    shape = (len(tensors) // each, each * rows, columns)
    flat = concat(tensors)
    # LazyTensor.view would count the memory of a copy, which is not made here.
    return LazyTensor(
        shape, flat.dtype, lambda session: flat.load(session).view(shape), flat.leaves, flat.peak
    )
