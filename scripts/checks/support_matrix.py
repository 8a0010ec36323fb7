"""The support matrix: every implementation, as ``absorbed_mla.registry`` has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from absorbed_mla import registry
from benchmarks.kit.tables import markdown_table

# Name of the table -> registry and what its entries are called.
KINDS = {
    "support attention backends": (registry.ATTENTION_BACKENDS, "backend"),
    "support paged backends": (registry.PAGED_BACKENDS, "backend"),
    "support context parallel": (registry.CP_STRATEGIES, "strategy"),
    "support caches": (registry.LATENT_CACHES, "cache"),
    "support checkpoint layouts": (registry.CHECKPOINT_LAYOUTS, "layout"),
}
# Of entries that compute in one form only, or in both.
FORMS = "forms"


def support_table(name: str) -> str:
    """One table of the matrix.

    Args:
        name: One of :data:`KINDS`.
    """
    implementations, kind = KINDS[name]
    entries = list(_declared(implementations))
    with_forms = any(hasattr(entry, FORMS) for entry in entries)
    lines = []
    for entry in entries:
        forms = [", ".join(getattr(entry, FORMS))] if with_forms else []
        lines.append([f"`{entry.name}`", *forms, entry.summary])
    head = [kind, *(["form"] if with_forms else []), "what it is"]
    return markdown_table(head, lines, head)


def _declared(implementations: registry.Registry) -> Iterator[registry.Described]:
    """The entries of a registry."""
    # TO BE REMOVED WHEN EVERY FOLDER HAS ENTRIES: yield from implementations instead.
    if not _every_file_declares(implementations):
        return
    yield from implementations


def _every_file_declares(implementations: registry.Registry) -> bool:
    """Whether every file of the folder ends with an entry. To be removed with its use above."""
    folder = Path(registry.__file__).parent.joinpath(*implementations.package.split(".")[1:])
    files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
    return bool(files) and all("\nENTRY = " in file.read_text() for file in files)
