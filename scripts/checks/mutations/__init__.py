"""Ways to break the package that tests must notice, a file for each part of it."""

from __future__ import annotations

from checks.mutations import attention, conversion, kernels, layer, programs, serving

_PARTS = (layer, attention, kernels, serving, conversion, programs)
MUTATIONS = {name: one for part in _PARTS for name, one in part.MUTATIONS.items()}
assert len(MUTATIONS) == sum(len(part.MUTATIONS) for part in _PARTS), "a name is used twice"
