"""Implementations of one kind, one file each, found by the name of the file.

A folder such as ``core_attention/backends`` holds nothing but implementations. The file
``backends/hopper.py`` is the backend ``"hopper"`` and ends with ``ENTRY = ...``, the object that
describes and runs it. Options, the automatic choice, error messages and the support matrix in the
documentation read the registry, so a new file is the whole addition.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar


class Described(Protocol):
    """What every entry declares.

    Attributes:
        name: As the option names it; the name of its file.
        summary: What it is and what it needs, one plain phrase for the support matrix.
    """

    name: str
    summary: str


Entry = TypeVar("Entry", bound=Described)


class Registry(Generic[Entry]):
    """The implementations in one folder, and those that a program registers itself.

    Args:
        option: Name of the option that users choose by, for error messages.
        package: Full name of the folder.
    """

    def __init__(self, option: str, package: str) -> None:
        self.option = option
        self.package = package
        self._registered: dict[str, Entry] = {}

    @functools.cached_property
    def _files(self) -> frozenset[str]:
        """Names of the folder's files, read once: layers look entries up in every step."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations is not None, self.package
        return frozenset(
            module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)
        )

    def names(self) -> tuple[str, ...]:
        """All names, sorted. Imports nothing, so that command lines can show them quickly."""
        return tuple(sorted({*self._files, *self._registered}))

    def __getitem__(self, name: str) -> Entry:
        """The entry of that name.

        Raises:
            ValueError: If there is none, with the names there are.
        """
        self.require(name)
        if name in self._registered:
            return self._registered[name]
        entry: Entry = importlib.import_module(f"{self.package}.{name}").ENTRY
        assert entry.name == name, f"{self.package}/{name}.py declares the name {entry.name!r}"
        return entry

    def __iter__(self) -> Iterator[Entry]:
        """All entries in the order of their names."""
        return (self[name] for name in self.names())

    def require(self, name: object, *others: str) -> None:
        """Refuse a name that is neither an entry's nor one of ``others``.

        Raises:
            ValueError: Naming the option, what it got and what it accepts.
        """
        accepted = (*others, *self.names())
        if name not in accepted:
            raise ValueError(f"{self.option} must be one of {', '.join(accepted)}; got {name!r}")

    def register(self, entry: Entry) -> None:
        """Add an entry from outside of the folder; users choose it by its name.

        Raises:
            ValueError: If the name is taken.
        """
        if entry.name in self.names():
            raise ValueError(f"{self.option} has an entry named {entry.name!r} already")
        self._registered[entry.name] = entry

    @contextlib.contextmanager
    def registered(self, entry: Entry) -> Iterator[Entry]:
        """Have ``entry`` registered inside of a ``with`` block."""
        self.register(entry)
        try:
            yield entry
        finally:
            del self._registered[entry.name]

    def examine(self, name: str, request: Any) -> tuple[list[Entry], dict[str, str]]:
        """The entries that can do what is requested, and why the others cannot, by name.

        Entries answer ``why_not(request)``: the reason why they cannot, or None.

        Args:
            name: The only entry to ask, or ``"auto"`` for all.
            request: What must be done.

        Raises:
            ValueError: If there is no entry of that name.
        """
        self.require(name, "auto")
        runnable: list[Entry] = []
        refused: dict[str, str] = {}
        for entry in self if name == "auto" else (self[name],):
            reason = entry.why_not(request)  # type: ignore[attr-defined]
            if reason is None:
                runnable.append(entry)
            else:
                refused[entry.name] = reason
        return runnable, refused


ATTENTION_BACKENDS: Registry = Registry(
    "core_attention_backend", "absorbed_mla.core_attention.backends"
)
PAGED_BACKENDS: Registry = Registry("paged_attention_backend", "absorbed_mla.inference.backends")
CP_STRATEGIES: Registry = Registry("cp_comm_type", "absorbed_mla.context_parallel.strategies")
SPARSE_BACKENDS: Registry = Registry("sparse_attention_backend", "absorbed_mla.dsa.backends")
INDEXER_BACKENDS: Registry = Registry("indexer_backend", "absorbed_mla.dsa.indexer_backends")
LATENT_CACHES: Registry = Registry("inference_context", "absorbed_mla.inference.caches")
CHECKPOINT_LAYOUTS: Registry = Registry("layout", "absorbed_mla.checkpoint.layouts")
TOOL_PARSERS: Registry = Registry("tool_call_parser", "absorbed_mla.serving.server.tool_parsers")
