"""The support matrix: every implementation and model type, as the registries have it."""

from __future__ import annotations

from absorbed_mla import registry
from benchmarks.kit.tables import markdown_table
from checkpoint_conversion.model_type import MODELS

# Name of the table -> registry and what its entries are called.
KINDS = {
    "support attention backends": (registry.ATTENTION_BACKENDS, "backend"),
    "support paged backends": (registry.PAGED_BACKENDS, "backend"),
    "support sparse backends": (registry.SPARSE_BACKENDS, "backend"),
    "support indexer backends": (registry.INDEXER_BACKENDS, "backend"),
    "support context parallel": (registry.CP_STRATEGIES, "strategy"),
    "support caches": (registry.LATENT_CACHES, "cache"),
    "support checkpoint layouts": (registry.CHECKPOINT_LAYOUTS, "layout"),
    "support models": (MODELS, "`model_type`"),
}
# A further column, of entries that have it -> its head.
_COLUMNS = {"forms": "form", "released": "released"}


def support_table(name: str) -> str:
    """One table of the matrix.

    Args:
        name: One of :data:`KINDS`.
    """
    implementations, kind = KINDS[name]
    entries = list(implementations)
    more = {name: head for name, head in _COLUMNS.items() if any(hasattr(e, name) for e in entries)}
    lines = [
        [f"`{e.name}`", *(", ".join(getattr(e, name)) for name in more), e.summary] for e in entries
    ]
    head = [kind, *more.values(), "what it is"]
    return markdown_table(head, lines, head)
