"""``fuzz_gpu.py`` and ``run_gpu_tests.py``, whose own mistakes would hide those of kernels."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

_FUZZ = "scripts/checks/fuzz"
MUTATIONS = {
    "fuzz_tolerance": Mutation(
        f"{_FUZZ}/compare.py", "{torch.bfloat16: 3.0,", "{torch.bfloat16: 30.0,"
    ),
    "fuzz_missing_infinities": Mutation(
        f"{_FUZZ}/compare.py", "wrong = torch.isfinite(actual) != finite", "wrong = ~finite & False"
    ),
    "fuzz_undeclared_kernel": Mutation(
        f"{_FUZZ}/families/cache.py", '("kernels.paged.gather._gather_kernel",)', "()"
    ),
    "fuzz_other_experts": Mutation(
        f"{_FUZZ}/families/choice.py", "unlike | twice | outside", "twice | outside"
    ),
    "fuzz_edges_of_tokens": Mutation(
        f"{_FUZZ}/families/sampling.py", "_EDGE * whole + 1", "0.9 * whole + 1"
    ),
    "fuzz_dead_process": Mutation(
        f"{_FUZZ}/runner.py", "self.results.add(*worker.case, Outcome(", "print(Outcome("
    ),
    "fuzz_case_that_hangs": Mutation(
        f"{_FUZZ}/runner.py", "now - worker.since > _MOST_SECONDS", "now < worker.since"
    ),
    "fuzz_kernel_never_launched": Mutation(
        f"{_FUZZ}/results.py", "sorted(declared - set(self.kernels))", "[]"
    ),
    "gpu_tests_run_twice": Mutation(
        "scripts/checks/gpu_tests/processes.py",
        'f"--deselect={test}" for test in job.left_out',
        'f"--deselect={test}" for test in ()',
    ),
    "gpu_tests_in_no_job": Mutation(
        "scripts/checks/gpu_tests/plan.py",
        "return [rest, *(replace(whole, tests=(test,)) for test in divided)]",
        "return [rest]",
    ),
    "gpu_test_results_that_json_refuses": Mutation(
        "scripts/checks/gpu_tests/results.py",
        "skips: dict[str, int] = field(default_factory=dict)",
        'skips: dict[str, int] = field(default_factory=__import__("collections").Counter)',
    ),
}
