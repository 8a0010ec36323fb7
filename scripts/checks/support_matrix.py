"""The support matrix: every implementation, as ``absorbed_mla.registry`` has it."""

from __future__ import annotations

from absorbed_mla import registry
from benchmarks.kit.tables import markdown_table

# Name of the table -> registry and what its entries are called.
KINDS = {
    "support attention backends": (registry.ATTENTION_BACKENDS, "backend"),
    "support paged backends": (registry.PAGED_BACKENDS, "backend"),
    "support sparse backends": (registry.SPARSE_BACKENDS, "backend"),
    "support indexer backends": (registry.INDEXER_BACKENDS, "backend"),
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
    entries = list(implementations)
    with_forms = any(hasattr(entry, FORMS) for entry in entries)
    lines = []
    for entry in entries:
        forms = [", ".join(getattr(entry, FORMS))] if with_forms else []
        lines.append([f"`{entry.name}`", *forms, entry.summary])
    head = [kind, *(["form"] if with_forms else []), "what it is"]
    return markdown_table(head, lines, head)
