"""Megatron with another name for something, as a later release may have."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.contexts.gpu_view import ContextGPUView
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

import absorbed_mla
from absorbed_mla import megatron_names
from absorbed_mla.batch_invariant import megatron_operators
from absorbed_mla.megatron_names import MegatronName, Need
from absorbed_mla.serving.megatron_engine import names as engine_names

# They use each other's private names.
_ENGINE_CLASSES = (
    DynamicInferenceContext,
    ContextGPUView,
    KVBlockAllocator,
    DynamicInferenceEngine,
    TextGenerationController,
)
# Of the class itself, which shows them to all.
_OVERRIDDEN = {"initialize_attention_state"}
_PACKAGE = str(Path(absorbed_mla.__file__).parent)
# The files with tables of them.
_TABLES = (megatron_names, megatron_operators, engine_names)
ALL_NEEDS = [one for table in _TABLES for one in vars(table).values() if isinstance(one, Need)]


def owner_of(name: MegatronName) -> type | ModuleType:
    try:
        return importlib.import_module(name.owner)
    except ModuleNotFoundError:
        module, _, own = name.owner.rpartition(".")
        return getattr(importlib.import_module(module), own)


def take_away(monkeypatch: pytest.MonkeyPatch, name: MegatronName) -> None:
    """Have Megatron go on with another name for this one, and this package find nothing there."""
    owner = owner_of(name)
    if isinstance(owner, ModuleType):
        _rename(monkeypatch, [owner, *_classes_of(owner)], name.name)
    elif owner not in _ENGINE_CLASSES:
        _rename(monkeypatch, [owner], name.name)
    elif name.name.startswith("_") or name.name in _OVERRIDDEN:
        _rename(monkeypatch, _ENGINE_CLASSES, name.name)
    else:
        _hide(monkeypatch, owner, name.name)


def words_of(owner: type) -> set[str]:
    """Attributes of a class, and names that its methods use."""
    codes = [function.__code__ for function in _functions(owner)]
    return {*vars(owner), *(word for code in codes for word in code.co_names)}


def _classes_of(module: ModuleType) -> list[type]:
    found = vars(module).values()
    return [one for one in found if isinstance(one, type) and one.__module__ == module.__name__]


def _rename(monkeypatch: pytest.MonkeyPatch, owners, old: str) -> None:
    """Have classes and modules say ``renamed`` and ``old`` instead of ``old``, as they call it."""
    new, found = f"{old}_renamed", False
    for owner in owners:
        for function in _functions(owner):
            code = _renamed(function.__code__, old, new)
            if code is not function.__code__:
                monkeypatch.setattr(function, "__code__", code)
                found = True
        if old in vars(owner):
            monkeypatch.setattr(owner, new, vars(owner)[old], raising=False)
            monkeypatch.delattr(owner, old)
            found = True
    assert found, f"nothing in Megatron uses {old}"


def _functions(owner: type | ModuleType) -> Iterator[FunctionType]:
    """What a class or module has of functions, inside of their decorators."""
    for value in list(vars(owner).values()):
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


def _hide(monkeypatch: pytest.MonkeyPatch, owner: type, hidden: str) -> None:
    """Have objects of a class show an attribute to Megatron alone.

    Many objects may have attributes of such a name, which a change of code would rename, too.
    """
    plain = owner.__getattribute__

    def found(self: object, name: str) -> object:
        if name == hidden and sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return plain(self, name)

    monkeypatch.setattr(owner, "__getattribute__", found)


def record_accesses(monkeypatch: pytest.MonkeyPatch) -> dict[type, set[str]]:
    """By class of Megatron's engine, attributes of its objects that this package gets or sets."""
    found: dict[type, set[str]] = {owner: set() for owner in _ENGINE_CLASSES}
    for owner in _ENGINE_CLASSES:
        for method in ("__getattribute__", "__setattr__"):
            monkeypatch.setattr(owner, method, _recording(getattr(owner, method), found[owner]))
    return found


def _recording(plain: Callable, found: set[str]) -> Callable:
    def call(self: object, name: str, *value: object) -> object:
        if sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
            found.add(name)
        return plain(self, name, *value)

    return call
