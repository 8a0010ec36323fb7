"""Megatron's inference engine with another name for something, as a later version may have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

import pytest
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.contexts.gpu_view import ContextGPUView
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

_CLASSES = (
    DynamicInferenceContext,
    ContextGPUView,
    KVBlockAllocator,
    DynamicInferenceEngine,
    TextGenerationController,
)


def rename(monkeypatch: pytest.MonkeyPatch, old: str) -> None:
    """Have all of Megatron's inference classes say ``renamed`` and ``old`` instead of ``old``.

    What they call by that name, they go on to call; nobody else finds it.
    """
    new, found = f"{old}_renamed", False
    for cls in _CLASSES:
        for function in _functions(cls):
            code = _renamed(function.__code__, old, new)
            if code is not function.__code__:
                monkeypatch.setattr(function, "__code__", code)
                found = True
        if old in vars(cls):
            monkeypatch.setattr(cls, new, vars(cls)[old], raising=False)
            monkeypatch.delattr(cls, old)
    assert found, f"nothing in Megatron uses {old}"


def _functions(cls: type) -> Iterator[FunctionType]:
    """What a class has of functions, inside of their decorators."""
    for value in list(vars(cls).values()):
        value = getattr(value, "fget", getattr(value, "__func__", value))
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, FunctionType):
            yield value


def _renamed(code: CodeType, old: str, new: str) -> CodeType:
    """The code with another name for attributes, also in functions and texts inside of it."""
    names = tuple(new if name == old else name for name in code.co_names)
    constants = tuple(
        _renamed(one, old, new) if isinstance(one, CodeType) else new if one == old else one
        for one in code.co_consts
    )
    same = all(one is other for one, other in zip(constants, code.co_consts))
    if same and names == code.co_names:
        return code
    return code.replace(co_names=names, co_consts=constants)
