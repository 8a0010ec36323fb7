"""Allow-lists for the pickles in checkpoint files, which otherwise could run any code.

* :func:`check_globals` vets the pickle of a ``torch.save`` file before
  ``torch.load(weights_only=True)`` unpickles it. The list is shorter than torch's own. Objects that
  Megatron saves beside tensors (random states of numpy, its own enums) become empty stand-ins:
  their libraries are neither imported nor called.
* :func:`load_metadata` unpickles the ``.metadata`` file of a distributed checkpoint, which torch's
  ``FileSystemReader`` would unpickle without any check. ``find_class`` returns only the classes
  that torch and Megatron store there, and only the opcodes that these need are implemented.
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import re
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

from checkpoint_conversion.checkpoint_folder import shown_name
from checkpoint_conversion.errors import CheckpointError

# Globals that torch.load rebuilds itself.
_BUILT = re.compile(
    r"_codecs\.encode|argparse\.Namespace|collections\.OrderedDict"
    r"|(builtins|__builtin__)\.(bytearray|complex|set)"
    r"|torch\.(Size|device|_utils\._rebuild_(parameter|tensor_v2|tensor_v3))"
    r"|torch\.(storage\.)?(Typed|Untyped)Storage"
    r"|torch\.(\w+Storage|b?float\w+|u?int\d+|bool|complex\w+|double|half|long)"
)
_STAND_INS = re.compile(
    r"(megatron|modelopt|numpy|transformer_engine)\.[\w.]+"
    r"|_io\.BytesIO|pathlib\.([\w.]+\.)?\w*Path|signal\.\w+|types\.SimpleNamespace"
    r"|torch\._C\.Generator"
)
# Codecs from bytes to bytes: nested calls could expand a small pickle to any size in memory.
_BYTES_CODECS = {"base64", "base_64", "bz2", "hex", "quopri", "quoted_printable"}
_BYTES_CODECS |= {"uu", "zip", "zlib"}
_BYTES_CODECS |= {f"{name}_codec" for name in _BYTES_CODECS} | {"quotedprintable"}
# Metadata of 100 000 chunks has 20 MB, with Megatron's additions 60 MB.
_MAX_METADATA_BYTES = 1 << 30


class StandIn:
    """Empty replacement for an object of a library that is not imported."""

    def __new__(cls, *args: object) -> StandIn:
        """Ignores all arguments."""
        return super().__new__(cls)

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def check_globals(pickled: bytes) -> list[Callable | tuple[Callable, str]]:
    """Check every global that the pickle of a ``torch.save`` file names.

    Returns:
        The argument for ``torch.serialization.add_safe_globals``.

    Raises:
        CheckpointError: Naming the globals that are refused.
    """
    names, strings = set(), set()
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            names.add(str(argument).replace(" ", "."))
        elif isinstance(argument, str):
            strings.add(argument)
    stand_ins = {name for name in names if _STAND_INS.fullmatch(name)}
    refused = {name for name in names - stand_ins if not _BUILT.fullmatch(name)}
    if refused:
        raise CheckpointError(
            f"would need {', '.join(sorted(refused))}, which is refused: a checkpoint may hold "
            "tensors and plain values"
        )
    codecs = {re.sub(r"[^a-z0-9]+", "_", text.lower()) for text in strings} & _BYTES_CODECS
    if "_codecs.encode" in names and codecs:
        raise CheckpointError(f"would need the codec {min(codecs)}, which is refused")
    made = {name: type(name.rpartition(".")[2], (StandIn,), {"path": name}) for name in stand_ins}
    return [argparse.Namespace, *((stand_in, name) for name, stand_in in made.items())]


def load_metadata(path: Path) -> Metadata:
    """Unpickle the metadata of a distributed checkpoint.

    The result is made of torch's own classes, but only the types of the objects are checked: their
    fields may hold anything that a pickle can hold without naming other classes.

    Raises:
        CheckpointError: If it cannot be read, is too large, names another class, or is no metadata.
    """
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_METADATA_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        result = _MetadataUnpickler(io.BytesIO(data)).load()
    # A damaged pickle can make the pickle module and the classes raise anything.
    except Exception as error:
        known = isinstance(error, pickle.UnpicklingError)
        what = str(error) if known else f"it is damaged ({type(error).__name__})"
        raise CheckpointError(f"{path} cannot be read: {what}") from error
    if not isinstance(result, Metadata):
        raise CheckpointError(f"{path} holds no metadata of a distributed checkpoint")
    return result


def _layout(name: str) -> torch.layout:
    """``torch.serialization._get_layout`` for the one layout that checkpoints have."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"the layout {shown_name(name)} is not supported")
    return torch.strided


def _ordered_dict() -> OrderedDict:
    """An empty dict; without arguments, whose keys could take forever to hash."""
    return OrderedDict()


# Dataclasses: made empty (NEWOBJ), then given their fields (BUILD).
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
# Called with arguments (REDUCE).
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
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_KNOWN = {
    **{(cls.__module__, cls.__name__): cls for cls in _RECORDS},
    # Subclasses that Megatron-Core had until 0.15.
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (_MEGATRON, "MCoreSavePlan"): SavePlan,
    **_CALLED,
    **{
        ("torch", str(value).removeprefix("torch.")): value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
    },
}
# What the pickle module writes for these objects since protocol 2: no sets, bytes, persistent ids
# or extensions.
_OPCODES = """
PROTO FRAME STOP MARK POP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
SHORT_BINUNICODE BINUNICODE BINUNICODE8
EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT GLOBAL STACK_GLOBAL
"""


class _MetadataUnpickler(pickle._Unpickler):
    """The pickle module's Python unpickler with an allow-list and few opcodes.

    The C unpickler would not do: it allocates any memory that a memo index in the file asks for.
    Allowed classes alone would not do either: BUILD could change a class, and nested tuples as
    dict keys or arguments could take forever to hash.
    """

    # The pickle module's table of opcodes.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]]
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        """One of the allowed classes, dtypes and functions."""
        known = _KNOWN.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(
                f"it names {shown_name(f'{module}.{name}')}, which is refused"
            )
        return known

    def reduce(self) -> None:
        """REDUCE: call an allowed function or class with plain arguments."""
        arguments = self.stack.pop()
        called = self.stack.pop()
        _require(any(called is known for known in _CALLED.values()))
        _require(type(arguments) is tuple and all(map(_is_flat, arguments)))
        self.stack.append(called(*arguments))

    def new_object(self) -> None:
        """NEWOBJ: make an empty record."""
        arguments = self.stack.pop()
        made = self.stack.pop()
        _require(arguments == () and any(made is record for record in _RECORDS))
        self.stack.append(made.__new__(made))

    def build(self) -> None:
        """BUILD: set the fields of a record."""
        state = self.stack.pop()
        record = self.stack[-1]
        _require(type(record) in _RECORDS)
        if type(record) is TensorProperties:
            record.__setstate__(state)
            return
        _require(type(state) is dict and all(type(key) is str for key in state))
        vars(record).update(state)

    def set_item(self) -> None:
        """SETITEM: put one entry into a dict."""
        value = self.stack.pop()
        key = self.stack.pop()
        self._put(self.stack[-1], key, value)

    def set_items(self) -> None:
        """SETITEMS: put entries into a dict."""
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
    """Whether it is an integer, a string or a tuple of integers."""
    if type(value) is tuple:
        return all(type(entry) is int for entry in value)
    return type(value) in (int, str)


def _require(condition: bool) -> None:
    if not condition:
        raise pickle.UnpicklingError("it makes objects as no checkpoint needs them")


def _opcode(name: str) -> int:
    return getattr(pickle, name)[0]


_MetadataUnpickler.dispatch = {
    **{
        _opcode(name): pickle._Unpickler.dispatch[_opcode(name)]  # type: ignore[attr-defined]
        for name in _OPCODES.split()
    },
    _opcode("REDUCE"): _MetadataUnpickler.reduce,
    _opcode("NEWOBJ"): _MetadataUnpickler.new_object,
    _opcode("BUILD"): _MetadataUnpickler.build,
    _opcode("SETITEM"): _MetadataUnpickler.set_item,
    _opcode("SETITEMS"): _MetadataUnpickler.set_items,
}
