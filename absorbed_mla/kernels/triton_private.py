"""The private names of Triton that kernels need, and what for; no other file imports any.

============================ ================== ==============================================
Name                         Triton             Without it
============================ ================== ==============================================
``core._aggregate``          3.6, 3.7           No Hopper kernel: Gluon has no public name for
                                                it, and its own examples import it like this.
``standard._sum_combine``,   3.2 and later      ``tl.sum`` and the like, which the interpreter
``standard._elementwise_*``                     does not run within a device function: it knows
                                                reductions by these functions.
============================ ================== ==============================================
"""

from __future__ import annotations

import inspect
import linecache
from typing import TypeVar, dataclass_transform

from triton.language import standard

# What ``tl.reduce`` and ``tl.associative_scan`` combine by.
sum_combine = standard._sum_combine
elementwise_max = standard._elementwise_max
elementwise_min = standard._elementwise_min

Class = TypeVar("Class")


@dataclass_transform()
def aggregate(cls: type[Class]) -> type[Class]:
    """A class of device code: values that Triton passes and returns together.

    It gets a constructor of its annotated fields, those of type ``constexpr`` for constants, as
    :func:`dataclasses.dataclass` would make it. Triton keys what it has compiled by the source of
    the constructor, so this one has a source: fields in another order are another kernel.

    Args:
        cls: Methods of ``gluon.jit`` and fields, which follow its own, may be inherited from
            classes that are no aggregates.
    """
    # Not in the older releases that the other kernels run on.
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.language.core import _aggregate

    kinds = {}
    for each in cls.__mro__:
        kinds |= inspect.get_annotations(each)
    cls.__annotations__ = kinds
    fields = {
        name: f"gl.constexpr({name})" if kind is gl.constexpr else name
        for name, kind in kinds.items()
    }
    source = f"def __init__(self, {', '.join(fields)}):\n" + "".join(
        f"    self.{name} = {value}\n" for name, value in fields.items()
    )
    file = f"<fields of {cls.__module__}.{cls.__qualname__}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    scope = {"gl": gl, "__name__": cls.__module__}
    exec(compile(source, file, "exec"), scope)
    constructor = scope["__init__"]
    constructor.__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = gluon.constexpr_function(constructor)
    return _aggregate(cls)
