"""What surrounds the layer in training: multi-token prediction, optimizers, adapters, warm-up."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "mtp_shifts_padding_into_documents": Mutation(
        "absorbed_mla/packed_roll.py", "(left <= 1).to(device)", "(left <= 0).to(device)"
    ),
    "mtp_padding_as_tokens": Mutation(
        "absorbed_mla/packed_roll.py",
        "found | (values & step.padding) if values.dtype is torch.bool else found",
        "found",
    ),
    "mtp_shift_within_a_rank": Mutation(
        "absorbed_mla/packed_roll.py",
        "own, places = part.tokens(), part.sequence_order()",
        "own, places = part.tokens(), part.rank_major()",
    ),
    "mtp_shift_not_corrected": Mutation(
        "specs/absorbed_mla_parts.py", "        correct_packed_roll()  # Here", "        # Here"
    ),
    "indexer_loss_of_mtp_in_the_decoders": Mutation(
        "absorbed_mla/dsa/core_attention.py", "place = decoder + min(place, mtp)", "pass"
    ),
    "mtp_shares_a_selection": Mutation(
        "absorbed_mla/dsa/core_attention.py",
        "self.dsa = replace(self.dsa, topk_freq=1)",
        "pass",
    ),
    "frozen_warm_up_not_refused": Mutation(
        "absorbed_mla/dsa/checkpoint_scope.py", "not scope.is_recomputed", "False"
    ),
    "muon_choice_dropped": Mutation(
        "absorbed_mla/muon/optimizer_hook.py", 'if layer.update != "auto":', "if False:"
    ),
    "clipped_below_an_adapter": Mutation(
        "absorbed_mla/megatron_interface.py", "    if others:\n", "    if False:\n"
    ),
    "extra_state_of_a_wrapped_layer": Mutation(
        "absorbed_mla/checkpoint/sharded.py",
        'key.startswith(prefix + "linear_") and key',
        'key.startswith(prefix + "linear_kv_down_proj._") and key',
    ),
    "indexer_without_a_loss_unseen": Mutation(
        "absorbed_mla/dsa/aux_loss.py", "if held and torch.is_grad_enabled()", "if False"
    ),
    "recall_in_a_step_of_generation": Mutation(
        "absorbed_mla/testing/indexer_recall.py",
        "        layer.choose_cached_keys = _refuse_cached  # type",
        "        layer.choose_cached_keys = layer.choose_cached_keys  # type",
    ),
    "recall_of_one_ranks_heads": Mutation(
        "absorbed_mla/testing/indexer_recall.py",
        "            dist.all_reduce(mass, group=tp_group)",
        "            pass",
    ),
    "relu_gradient_at_zero": Mutation(
        "absorbed_mla/dsa/scores.py", "(products > 0)", "(products >= 0)"
    ),
    "relu_gradient_at_zero_of_visible_keys": Mutation(
        "absorbed_mla/kernels/dsa/index_gradient.py",
        "tl.where(found > 0, of_products, 0.0)",
        "tl.where(found >= 0, of_products, 0.0)",
    ),
    "relu_gradient_at_zero_of_chosen_keys": Mutation(
        "absorbed_mla/kernels/dsa/index_chosen.py",
        "tl.where(found > 0, of_products, 0.0)",
        "tl.where(found >= 0, of_products, 0.0)",
    ),
    "index_key_gradients_in_bf16": Mutation(
        "absorbed_mla/dsa/indexer_loss.py",
        "torch.zeros_like(key, dtype=weights.dtype)",
        "torch.zeros_like(key, dtype=kept)",
    ),
    "mask_of_a_pack_that_hides_more": Mutation(
        "absorbed_mla/core_attention/masks/redundant.py",
        "found |= (mask[:, :, rows] & seen).any()",
        "pass",
    ),
    "mask_of_a_pack_asked_of_earlier_bits": Mutation(
        "absorbed_mla/core_attention/masks/redundant.py",
        "    if tuple(known) != asked or",
        "    if answer is None or",
    ),
    "whole_iterations_trained": Mutation(
        "absorbed_mla/attention.py", "            refuse_full_iterations(self.config)\n", ""
    ),
    "full_disk_as_a_traceback": Mutation(
        "scripts/training/saving.py",
        "except (OSError, CheckpointException, RuntimeError) as error:",
        "except (OSError, RuntimeError) as error:",
    ),
    "tied_embeddings_on_the_stage_of_mtp": Mutation(
        "absorbed_mla/unsupported.py",
        "if layout is None or layout.layout[-1][-1].count(LayerType.mtp):",
        "if False:",
    ),
    "router_of_mtp_counts_padding": Mutation(
        "absorbed_mla/packed_router.py",
        'getattr(layer.submodules, "mtp_model_layer", layer)',
        "layer",
    ),
    "padding_is_saved_as_tokens": Mutation(
        "scripts/training/arguments.py",
        "args.vocab_size = size if size == args.padded_vocab_size else None",
        "args.vocab_size = args.padded_vocab_size",
    ),
    "tokens_are_saved_as_padding": Mutation(
        "scripts/training/arguments.py",
        "args.vocab_size = size if size == args.padded_vocab_size else None",
        "args.vocab_size = None",
    ),
    "training_forgets_the_loaded_vocabulary": Mutation(
        "scripts/training/arguments.py",
        "vars(args).update(args.loaded_vocabulary)",
        "pass",
    ),
    "resuming_draws_random_numbers": Mutation(
        "scripts/training/megatron_loop.py",
        "with torch.random.fork_rng(devices=()):",
        "with contextlib.nullcontext():",
    ),
    "resumed_with_the_rates_of_before": Mutation(
        "scripts/training/saving.py",
        "group.update({name: value for name, value in own.items() if name in group})",
        "pass",
    ),
    "indexer_loss_of_one_ranks_tokens": Mutation(
        "scripts/training/report.py", "ranks / max(tokens, 1)", "1 / max(tokens, 1)"
    ),
}
