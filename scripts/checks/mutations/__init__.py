"""Ways to break the package that tests must notice, a file for each part of it."""

from __future__ import annotations

from checks.mutations import (
    checkpoint,
    context_parallel,
    conversion,
    core_attention,
    data_parallel_attention,
    experts,
    export,
    fuzz,
    generation,
    graphs,
    inference,
    installation,
    kernels,
    latent_cache,
    layer,
    offloading,
    options,
    prefix_cache,
    serving,
    sparse_attention,
    training,
)
from checks.mutations.mutation import Mutation

_PARTS = (
    layer,
    checkpoint,
    core_attention,
    context_parallel,
    kernels,
    sparse_attention,
    inference,
    generation,
    training,
    conversion,
    prefix_cache,
    serving,
    installation,
    fuzz,
    experts,
    latent_cache,
    data_parallel_attention,
    graphs,
    offloading,
    options,
    export,
)
MUTATIONS: dict[str, Mutation] = {
    name: mutation for part in _PARTS for name, mutation in part.MUTATIONS.items()
}
assert len(MUTATIONS) == sum(len(part.MUTATIONS) for part in _PARTS), "a name is used twice"
