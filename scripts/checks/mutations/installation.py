"""What newcomers meet: packages that hide ours, exported models, mistakes in command lines."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "hidden_package_passes": Mutation(
        "absorbed_mla/own_packages.py",
        "if not any(_same(own, place) for place in found):",
        "if not found:",
    ),
    "hidden_package_in_the_converter": Mutation(
        "absorbed_mla/convert_command.py",
        'require_own_packages("checkpoint_conversion")',
        "require_own_packages()",
    ),
    "exported_activation": Mutation(
        "absorbed_mla/serving/export/live.py",
        "if config.activation_func is not F.silu:",
        "if False:",
    ),
    "padding_of_another_size": Mutation(
        "scripts/training/rules.py",
        'f"--make-vocab-size-divisible-by {ranks}; then --load FOLDER"',
        'f"--make-vocab-size-divisible-by {ranks + 1}; then --load FOLDER"',
    ),
    "auto_exchange_of_sparse_attention": Mutation(
        "scripts/training/checks.py",
        '["all_gather" if x == "auto" else x for x in args.cp_comm_type]',
        "[*args.cp_comm_type]",
    ),
}
