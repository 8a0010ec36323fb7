"""Saved activations in host memory."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "offloaded_weights": Mutation(
        "absorbed_mla/offloading.py",
        "kept = (*kept, *self._parameters())",
        "kept = (*kept,)",
    ),
    "offloading_while_it_is_off": Mutation(
        "absorbed_mla/offloading.py",
        'if not getattr(manager, "inside_context", False):',
        "if False:",
    ),
    "offloading_of_all_stages": Mutation(
        "absorbed_mla/offloading.py",
        "if name not in self._stages or not torch.is_grad_enabled():",
        "if not torch.is_grad_enabled():",
    ),
    "offloaded_views_of_weights": Mutation(
        "absorbed_mla/offloading.py",
        "if tensor.untyped_storage().data_ptr() in kept:",
        "if tensor.data_ptr() in kept:",
    ),
    "offloaded_inputs_of_recomputation": Mutation(
        "absorbed_mla/offloading.py",
        "    with saved_tensors_hooks(_same, _same):\n        return function(*args)",
        "    return function(*args)",
    ),
    "offloaded_inputs_that_are_recomputed": Mutation(
        "absorbed_mla/attention.py",
        "recomputed = (kv, *query) if up_project else ()",
        "recomputed = ()",
    ),
}
