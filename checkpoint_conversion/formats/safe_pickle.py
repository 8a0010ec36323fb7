"""Reading ``.metadata``, the pickle that says where a distributed checkpoint's tensors are.

The pickle module builds whatever a file tells it to. Here a file can only name the classes that
torch and Megatron write into a ``.metadata``, and use the opcodes that these need; nothing else is
looked up, called or changed.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.safe_paths import shown_name

# A checkpoint of 100 000 chunks needs 20 MB, with what Megatron adds 60 MB.
_MOST_BYTES = 1 << 30


class _MCoreMetadata(Metadata):
    """In the place of a class that Megatron-Core had until 0.15."""


class _MCoreSavePlan(SavePlan):
    """Likewise."""


def _layout(name: str) -> torch.layout:
    """``torch.serialization._get_layout``, for the one layout that checkpoints have."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"the layout {shown_name(name)} is not supported")
    return torch.strided


def _ordered_dict() -> OrderedDict:
    """An empty one; its entries follow."""
    return OrderedDict()


# Made empty, then given their fields.
_RECORDS = (
    BytesIOWriteData,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    SavePlan,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    _StorageInfo,
)
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_RENAMED: dict[tuple[str, str], Any] = {
    (_MEGATRON, "MCoreMetadata"): _MCoreMetadata,
    (_MEGATRON, "MCoreSavePlan"): _MCoreSavePlan,
}
# Called with arguments.
_CALLED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    **{(cls.__module__, cls.__name__): cls for cls in (WriteItemType, _MEM_FORMAT_ENCODING)},
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
}
_DTYPES = {
    ("torch", str(value).removeprefix("torch.")): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_KNOWN = {(cls.__module__, cls.__name__): cls for cls in _RECORDS} | _RENAMED | _CALLED | _DTYPES
# What the pickle module writes for such objects since protocol 2: no sets, no bytes, no persistent
# ids, no extensions.
_OPCODES = """
PROTO FRAME STOP MARK POP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
SHORT_BINUNICODE BINUNICODE BINUNICODE8
EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT GLOBAL STACK_GLOBAL
"""


def load_metadata(path: Path) -> Metadata:
    """Read the metadata of a distributed checkpoint.

    The objects are torch's own, of which only the types are known: fields may hold anything that a
    pickle can hold without naming further classes.

    Args:
        path: The file.

    Raises:
        CheckpointError: If it cannot be read, is too large, names anything else, or is no metadata.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{path} is larger than {_MOST_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        result = _Unpickler(io.BytesIO(data)).load()
    # Whatever a damaged pickle makes the module, or the classes, raise.
    except Exception as error:
        known = isinstance(error, pickle.UnpicklingError)
        what = str(error) if known else f"it is damaged ({type(error).__name__})"
        raise CheckpointError(f"{path} cannot be read: {what}") from error
    if not isinstance(result, Metadata):
        raise CheckpointError(f"{path} holds no metadata of a distributed checkpoint")
    return result


class _Unpickler(pickle._Unpickler):
    """The pickle module's unpickler in Python, whose handling of an opcode can be replaced.

    That in C trusts a file with indices that make it allocate any amount of memory.
    """

    # Where the pickle module's class finds what to do.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]]
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        """One of the known classes, dtypes and functions, under its exact name."""
        known = _KNOWN.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(
                f"it names {shown_name(f'{module}.{name}')}, which is refused"
            )
        return known

    def reduce(self) -> None:
        """Call something."""
        arguments = self.stack.pop()
        called = self.stack.pop()
        _require(any(called is known for known in _CALLED.values()))
        # Anything nested can be hashed, or turned into text, for ever.
        _require(type(arguments) is tuple and all(map(_is_flat, arguments)))
        self.stack.append(called(*arguments))

    def new_object(self) -> None:
        """Make an empty record."""
        arguments = self.stack.pop()
        made = self.stack.pop()
        records = (*_RECORDS, *_RENAMED.values())
        _require(arguments == () and any(made is record for record in records))
        self.stack.append(made.__new__(made))

    def build(self) -> None:
        """Give a record its fields."""
        state = self.stack.pop()
        record = self.stack[-1]
        _require(type(record) in (*_RECORDS, *_RENAMED.values()))
        if type(record) is TensorProperties:
            record.__setstate__(state)
            return
        _require(type(state) is dict and all(type(key) is str for key in state))
        vars(record).update(state)

    def set_item(self) -> None:
        """Put one entry into a dict."""
        value = self.stack.pop()
        key = self.stack.pop()
        self._put(self.stack[-1], key, value)

    def set_items(self) -> None:
        """Put entries into a dict."""
        items = self.pop_mark()  # type: ignore[attr-defined]
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._put(self.stack[-1], key, value)

    def _put(self, target: Any, key: Any, value: Any) -> None:
        _require(type(target) in (dict, OrderedDict))
        if type(key) is MetadataIndex:
            _require(type(key.fqn) is str and type(key.offset) in (torch.Size, type(None)))
        else:
            _require(type(key) in (str, int))
        target[key] = value


def _is_flat(value: Any) -> bool:
    """Whether it is a number, a text or a tuple of whole numbers."""
    if type(value) is tuple:
        return all(type(entry) is int for entry in value)
    return type(value) in (int, str)


def _require(condition: bool) -> None:
    if not condition:
        raise pickle.UnpicklingError("it makes objects as no checkpoint needs them")


def _opcode(name: str) -> int:
    return getattr(pickle, name)[0]


_Unpickler.dispatch = {
    **{
        _opcode(name): pickle._Unpickler.dispatch[_opcode(name)]  # type: ignore[attr-defined]
        for name in _OPCODES.split()
    },
    _opcode("REDUCE"): _Unpickler.reduce,
    _opcode("NEWOBJ"): _Unpickler.new_object,
    _opcode("BUILD"): _Unpickler.build,
    _opcode("SETITEM"): _Unpickler.set_item,
    _opcode("SETITEMS"): _Unpickler.set_items,
}
