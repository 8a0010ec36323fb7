"""Programs and what tests stand on."""

from __future__ import annotations

from checks.mutations.table import read

MUTATIONS = read(
    r"""
scripts/checks/fuzz/compare.py
  fuzz_tolerance: {torch.bfloat16: 3.0, -> {torch.bfloat16: 30.0,
  fuzz_missing_infinities: wrong = torch.isfinite(actual) != finite -> wrong = ~finite & False
scripts/checks/fuzz/families/cache.py
  fuzz_undeclared_kernel: "gather", "kernels.paged.gather._gather_kernel" -> "gather"
scripts/checks/fuzz/families/experts.py
  fuzz_other_experts: unlike | twice | outside -> twice | outside
scripts/checks/fuzz/families/sampling.py
  fuzz_edges_of_tokens: _EDGE * whole + 1 -> 0.9 * whole + 1
scripts/checks/fuzz/results.py
  fuzz_kernel_never_launched: sorted(declared - set(self.kernels)) -> []
scripts/checks/fuzz/runner.py
  fuzz_dead_process: self.results.add(*worker.case, Outcome( -> print(Outcome(
  fuzz_case_that_hangs: now - worker.since > _MOST_SECONDS -> now < worker.since
scripts/checks/gpu_tests/plan.py
  gpu_tests_in_no_job: equal, tests=(test,)) for test in divided] -> equal) for test in ()]
scripts/checks/gpu_tests/processes.py
  gpu_tests_run_twice: for test in job.left_out -> for test in ()
  gpu_test_results_that_json_refuses: skips: dict[str, int] = field(default_factory=dict)
    -> skips: dict[str, int] = field(default_factory=__import__("collections").Counter)
scripts/generation/arguments.py
  generated_texts_of_equal_prompts_are_equal: add_flags(group, SamplingParams, _SAMPLING, FLAGS
    -> add_flags(group, SamplingParams, [*_SAMPLING, "seed"], FLAGS
scripts/training/arguments.py
  padding_is_saved_as_tokens: args.vocab_size = size if size == args.padded_vocab_size else None
    -> args.vocab_size = args.padded_vocab_size
  tokens_are_saved_as_padding: args.vocab_size = size if size == args.padded_vocab_size else None
    -> args.vocab_size = None
  training_forgets_the_loaded_vocabulary: vars(args).update(args.loaded_vocabulary) -> pass
scripts/training/checks.py
  auto_exchange_of_sparse_attention: ["all_gather" if x == "auto" else x for x in args.cp_comm_type]
    -> [*args.cp_comm_type]
scripts/training/megatron_loop.py
  resuming_draws_random_numbers: torch.random.fork_rng(devices=()): -> contextlib.nullcontext():
scripts/training/report.py
  indexer_loss_of_one_ranks_tokens: ranks / max(tokens, 1) -> 1 / max(tokens, 1)
scripts/training/rules.py
  padding_of_another_size: -vocab-size-divisible-by {ranks} -> -vocab-size-divisible-by {ranks + 1}
scripts/training/saving.py
  full_disk_as_a_traceback: (OSError, CheckpointException, RuntimeError) -> (OSError, RuntimeError)
  resumed_with_the_rates_of_before:
    - group.update({name: value for name, value in own.items() if name in group})
    -> pass
"""
)
