"""Triton's interpreter without what it computes in vain, which takes most of its time.

What a kernel computes stays the same, to the bit.
"""

import functools
import inspect
import math
from dataclasses import replace

import triton
import triton.language as tl
from triton.runtime import interpreter

# The interpreter's parts have no promised interface: that of another release stays as it is.
_RELEASES = ("3.6.", "3.7.")
_init_block_type = tl.block_type.__init__
_init_tensor = tl.tensor.__init__


@functools.cache
def quicken() -> None:
    """From now on, in this process."""
    if not triton.__version__.startswith(_RELEASES):
        return
    _leave_overflows()
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor


def _leave_overflows() -> None:
    """Overflows of integers are looked for, but asserted only where ``debug`` is set."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _once(patch_lang):
    """The language is replaced once for a launch, not at each call of a function by a kernel."""

    def patch_once(fn):
        languages = _languages_of(fn)
        if languages and all(map(_is_replaced, languages)):
            return interpreter._LangPatchScope()
        return patch_lang(fn)

    return patch_once


@functools.cache
def _languages_of(fn) -> list:
    values = fn.__globals__.values()
    return [value for value in values if inspect.ismodule(value) and value in (tl, tl.core)]


def _is_replaced(language) -> bool:
    return not any(map(tl.core.is_builtin, (language.load, tl.tensor.__add__)))


def _by_name(get_np_dtype):
    """A type is looked up; Triton makes a table of all types each time."""
    found: dict[str, object] = {}

    def get_by_name(dtype: tl.dtype):
        name = dtype.scalar.name
        if name not in found:
            found[name] = get_np_dtype(dtype)
        return found[name]

    return get_by_name


def init_block_type(self: tl.block_type, element_ty: tl.dtype, shape) -> None:
    """As Triton's; what follows from the shape is found once for each."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    self.element_ty = element_ty
    self.shape, self.numel, text = _block_of(sizes)
    self.name = f"<{text}, {element_ty}>"


@functools.cache
def _block_of(sizes: tuple[int, ...]) -> tuple[tl.tuple, int, str]:
    block = object.__new__(tl.block_type)
    _init_block_type(block, tl.int1, list(sizes))
    return block.shape, block.numel, str(block.shape)


def init_tensor(self: tl.tensor, handle, type: tl.dtype) -> None:
    """Likewise."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _shape_of(tuple(type.shape) if type.is_block() else ())


@functools.cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
