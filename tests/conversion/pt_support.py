"""Files of torch.save whose archive or pickle was tampered with."""

import io
import zipfile
from pathlib import Path

import torch
from torch import Tensor


class Calls:
    """Pickles as a call of ``function``; saved by torch, so that storages may be arguments."""

    def __init__(self, function, *arguments) -> None:
        self._call = (function, arguments)

    def __reduce__(self):
        return self._call


def rebuilt(values: Tensor, offset: int, shape: tuple, strides: tuple) -> Calls:
    """A tensor that claims any place in the storage of ``values``."""
    storage = torch.storage.TypedStorage(
        wrap_storage=values.untyped_storage(), dtype=values.dtype, _internal=True
    )
    rebuild = torch._utils._rebuild_tensor_v2
    return Calls(rebuild, storage, offset, shape, strides, False, {})


def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


def write_records(path: Path, content: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Write an archive with these records, checksums right."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def with_pickle(path: Path, change) -> None:
    """Replace an archive's pickle by what ``change`` makes of it."""
    content = records(path)
    name = next(name for name in content if name.endswith("data.pkl"))
    write_records(path, content | {name: change(content[name])})


def saved(content: object) -> bytes:
    """The bytes of a file of torch.save."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
