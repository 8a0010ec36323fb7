"""Reading checkpoints and tokenizers of others, and giving weights away."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "snapshots_read_any_link": Mutation(
        "checkpoint_conversion/hub_cache.py",
        "return file.is_relative_to(model / _BLOBS)",
        "return True",
    ),
    "snapshots_of_any_folder": Mutation(
        "checkpoint_conversion/hub_cache.py",
        " and model.name.startswith(_MODEL):",
        ":",
    ),
    "llm_forgets_follow_links": Mutation(
        "absorbed_mla/serving/weights/load.py",
        "open_checkpoint(folder, follow_links=follow_links)",
        "open_checkpoint(folder)",
    ),
    "tokenizer_beside_the_blobs": Mutation(
        "absorbed_mla/serving/weights/load.py",
        "return checkpoint.auxiliary_folder if checkpoint.auxiliary else None",
        "return min((p.parent for p in checkpoint.auxiliary.values()), default=None)",
    ),
    "tokenizer_code_runs_unasked": Mutation(
        "absorbed_mla/serving/tokenizers/folder.py",
        "local_files_only=True, trust_remote_code=trust_remote_code",
        "local_files_only=True, trust_remote_code=True",
    ),
    "tokenizer_code_is_replaced": Mutation(
        "absorbed_mla/serving/tokenizers/folder.py",
        "if code and not trust_remote_code:",
        "if False:",
    ),
    "tied_heads_are_not_compared": Mutation(
        "checkpoint_conversion/mapping.py",
        "result[first] = same_values(copies, _DIFFERS)",
        "result[first] = copies[0]",
    ),
    "tied_heads_of_megatron_are_unknown": Mutation(
        "checkpoint_conversion/mapping.py",
        "in (own, [row.megatron for row in rows]):",
        "in (own,):",
    ),
    "parts_of_copies_are_not_compared": Mutation(
        "checkpoint_conversion/lazy_tensor.py",
        "return same_values([tensor.narrow(dim, start, length) for tensor in tensors], problem)",
        "return first.narrow(dim, start, length)",
    ),
    "tokens_of_the_own_config_are_dropped": Mutation(
        "checkpoint_conversion/formats/vocabulary.py",
        "    if CONFIG in auxiliary:\n",
        "    if False:\n",
    ),
    "tokens_of_the_arguments_are_dropped": Mutation(
        "checkpoint_conversion/formats/vocabulary.py",
        'args.get("vocab_size")',
        'args.get("")',
    ),
    "any_number_of_rows_is_padding": Mutation(
        "checkpoint_conversion/formats/vocabulary.py",
        "0 < multiple * tp <= padding",
        "0 < multiple * tp < 0",
    ),
    "index_weights_are_rounded": Mutation(
        "absorbed_mla/serving/weights/load.py",
        "        keep_head_weights(model, config, tensors, dtype, parity=options.parity)\n",
        "",
    ),
    "index_weights_are_those_of_parity": Mutation(
        "absorbed_mla/serving/weights/index_weights.py",
        "    if parity:\n",
        "    if False:\n",
    ),
    "export_believes_the_config_about_mtp": Mutation(
        "absorbed_mla/serving/export/live.py",
        "dataclasses.replace(config, mtp_layers=count_mtp_layers(weights))",
        "config",
    ),
    "export_leaves_before_the_last_part": Mutation(
        "absorbed_mla/serving/export/iteration.py",
        "        if left:\n",
        "        if left > 1:\n",
    ),
    "export_without_messages": Mutation(
        "absorbed_mla/serving/export/weights.py",
        "if group.size() > 1 and device.type not in kinds:",
        "if False:",
    ),
    "megatron_configs_of_another_router": Mutation(
        "checkpoint_conversion/formats/megatron_folder.py",
        "            refuse_another_router(config, args, _ANOTHER_ROUTER.format(path=path))\n",
        "",
    ),
    "export_of_another_router": Mutation(
        "absorbed_mla/serving/export/live.py",
        "        refuse_another_router(config, args, _ANOTHER_ROUTER)\n",
        "",
    ),
    "export_of_megatrons_router": Mutation(
        "absorbed_mla/serving/export/live.py",
        "    fields.problems.extend(only_megatrons(found))\n",
        "",
    ),
    "export_reads_the_router_of_one_chunk": Mutation(
        "absorbed_mla/serving/export/live.py",
        "for chunk in chunks for m in",
        "for chunk in chunks[:1] for m in",
    ),
    "export_reads_the_router_of_one_stage": Mutation(
        "absorbed_mla/serving/export/weights.py",
        "router = one_router(routers)",
        "router = one_router([router_options(chunks)])",
    ),
    "export_hides_errors_of_other_ranks": Mutation(
        "absorbed_mla/serving/export/agreement.py",
        "        if message is not None:\n",
        "        if False:\n",
    ),
    "bridges_hide_the_converter": Mutation(
        "absorbed_mla/bridge/__init__.py",
        'require_own_packages("checkpoint_conversion", "specs")',
        'require_own_packages("specs")',
    ),
    "tied_heads_are_other_tensors": Mutation(
        "checkpoint_conversion/mapping.py",
        "if row.hugging_face == name) for name in _TIED]",
        "if row.hugging_face != name) for name in _TIED]",
    ),
    "models_have_names_of_the_table": Mutation(
        "checkpoint_conversion/mapping.py",
        "return config.model.tensors.get(name, name)",
        "return name",
    ),
    "fields_have_deepseeks_names": Mutation(
        "checkpoint_conversion/config_fields.py",
        "return self._names.get(name, name)",
        "return name",
    ),
    "defaults_of_models_are_ignored": Mutation(
        "checkpoint_conversion/config_fields.py",
        "self._defaults.get(name, default)",
        "default",
    ),
    "values_that_no_model_may_have": Mutation(
        "checkpoint_conversion/model.py",
        "            inner.only(name, only.value, only.accepted)",
        "            pass",
    ),
    "zero_is_false": Mutation(
        "checkpoint_conversion/config_fields.py",
        "if self.given(name) and not (boolean and self.equals(name, value)):",
        "if self.given(name) and not self.equals(name, value):",
    ),
    "mtp_layers_that_files_hold": Mutation(
        "checkpoint_conversion/mapping.py",
        "        count += 1\n    return count",
        "        count += 1\n    return 0",
    ),
    "weights_of_heads_are_quantised": Mutation(
        "checkpoint_conversion/mapping_table.py",
        'REPLICATED, "index_heads hidden", "indexer", float32=True',
        'REPLICATED, "index_heads hidden", "indexer", float32=True, fp8=True',
    ),
    "weights_of_heads_are_rounded": Mutation(
        "checkpoint_conversion/mapping_table.py",
        'REPLICATED, "index_heads hidden", "indexer", float32=True',
        'REPLICATED, "index_heads hidden", "indexer"',
    ),
    "experts_in_stacks_of_other_shapes": Mutation(
        "checkpoint_conversion/expert_stacks.py",
        "or result[name].shape != (len(experts), parts * rows, columns)",
        "or False",
    ),
    "images_are_weights_of_the_text_model": Mutation(
        "checkpoint_conversion/model_type.py",
        "None if name.startswith(images) else model.text_name(name)",
        "model.text_name(name)",
    ),
}
