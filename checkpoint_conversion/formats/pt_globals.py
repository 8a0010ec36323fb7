"""What a pickle in a file of torch.save may name, decided before anything is unpickled.

``torch.load(weights_only=True)`` builds only what it has been told to allow. The list here is
shorter than torch's own, and what Megatron saves beside tensors (random states of numpy, enums of
its own) is replaced by stand-ins that are empty: nothing of those libraries is imported or called.
"""

from __future__ import annotations

import argparse
import pickletools
import re
from collections.abc import Callable

from checkpoint_conversion.errors import CheckpointError

# What torch.load builds itself.
_BUILT = {
    "_codecs.encode",
    "argparse.Namespace",
    "builtins.bytearray",
    "builtins.complex",
    "builtins.set",
    "__builtin__.bytearray",
    "__builtin__.complex",
    "__builtin__.set",
    "collections.OrderedDict",
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
}
_BUILT_TORCH = re.compile(
    r"torch\.(\w+Storage|b?float\w+|u?int\d+|bool|complex\w+|double|half|long)"
)
_STAND_INS = re.compile(
    r"(megatron|modelopt|numpy|transformer_engine)\.[\w.]+"
    r"|_io\.BytesIO|pathlib\.([\w.]+\.)?\w*Path|signal\.\w+|types\.SimpleNamespace"
    r"|torch\._C\.Generator"
)
# Codecs from bytes to bytes: applied to their own result again and again, they fill any memory.
_BYTES_CODECS = {
    "base64",
    "base_64",
    "bz2",
    "hex",
    "quopri",
    "quoted_printable",
    "uu",
    "zip",
    "zlib",
}
_BYTES_CODECS |= {f"{name}_codec" for name in _BYTES_CODECS} | {"quotedprintable"}


class StandIn:
    """Takes the place of an object that only its library could build."""

    def __new__(cls, *args: object) -> StandIn:
        """Whatever the arguments, there is nothing to keep."""
        return super().__new__(cls)

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def check_globals(pickled: bytes) -> list[Callable | tuple[Callable, str]]:
    """Check everything that a pickle names.

    Returns:
        What ``torch.serialization.safe_globals`` has to allow.

    Raises:
        CheckpointError: Naming what is not accepted.
    """
    names, strings = set(), set()
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            names.add(str(argument).replace(" ", "."))
        elif isinstance(argument, str):
            strings.add(argument)
    stand_ins = {name for name in names if _STAND_INS.fullmatch(name)}
    refused = {name for name in names - _BUILT - stand_ins if not _BUILT_TORCH.fullmatch(name)}
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
