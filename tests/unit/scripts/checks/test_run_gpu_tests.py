"""scripts/checks/run_gpu_tests.py without a GPU: what it selects, runs together and reports."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from checks import run_gpu_tests
from checks.gpu_tests import plan
from checks.gpu_tests.plan import Job, jobs_of, shard_of
from checks.gpu_tests.processes import (
    Limits,
    environment_of,
    exit_code,
    results_of,
    run_jobs,
    seconds_by_file,
)

ROOT = Path(run_gpu_tests.__file__).resolve().parents[2]
LIMITS = Limits(jobs=3, job_seconds=60, seconds=60, memory_gib=0)
FILES = {
    "good": "def test_a(): pass\n",
    "bad": "def test_a(): pass\ndef test_b():\n    assert 1 == 2, 'two is not one'\n",
    "skipped": "import pytest\npytest.skip('needs a GPU', allow_module_level=True)\n",
    "crash": "import os\ndef test_a(): pass\ndef test_b(): os._exit(3)\n",
    "broken": "import no_such_module\n",
    "late": (
        "import pytest\n@pytest.fixture\ndef used():\n    yield\n    assert False, 'left over'\n"
        "def test_a(used): pass\n"
    ),
    "endless": "import time\ndef test_a(): pass\ndef test_b(): time.sleep(100)\n",
    # As a process of torchrun that fails where the first one does not.
    "other_rank": "import atexit, os\natexit.register(os._exit, 1)\ndef test_a(): pass\n",
}


def job_of(*names: str, **changes) -> Job:
    job = Job(tuple(f"test_{name}.py" for name in names), processes=0, gpus=1, seconds=1)
    return replace(job, **changes)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs jobs of the files above; returns the results by name."""
    for name, text in FILES.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "conftest.py").write_text(
        "from tests.support.report import record\n"
        "def pytest_configure(config):\n    record(config)\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, value in {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}.items():
        monkeypatch.setenv(name, value)

    def run(*jobs: Job, limits: Limits = LIMITS, say=lambda result: None):
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        results = run_jobs(jobs, folder, limits, (), say)
        return {one.file.removeprefix("test_").removesuffix(".py"): one for one in results}, folder

    return run


def test_what_became_of_tests(run):
    said = []
    found, folder = run(
        job_of("good", "bad", "late"),
        job_of("skipped"),
        job_of("crash"),
        job_of("broken"),
        job_of("other_rank"),
        say=said.append,
    )
    assert len(said) == len(found) == 7
    counts = {n: (one.passed, one.failed, one.skipped) for n, one in found.items()}
    assert counts["bad"] == (1, 1, 0) and counts["skipped"] == (0, 0, 1)
    assert found["bad"].failures == {"test_bad.py::test_b": "AssertionError: two is not one"}
    assert counts["late"] == (0, 1, 0) and "left over" in str(found["late"].failures)
    assert found["skipped"].ran_nothing and found["skipped"].skips == {"needs a GPU": 1}
    assert not found["skipped"].is_bad and not found["bad"].ended
    assert found["crash"].passed == 1 and found["crash"].ended == "exit code 3"
    assert found["broken"].is_bad and "no_such_module" in str(found["broken"].failures)
    assert found["other_rank"].ended == "exit code 1, and no test of the first process failed"
    lines = run_gpu_tests._summary(folder, 1.0, list(found.values()))
    text = "\n".join(lines)
    assert "test_skipped.py: 1 x needs a GPU" in text
    assert "test_bad.py::test_b: AssertionError: two is not one" in text
    assert "assert 1 == 2" in text, "the end of the log"
    assert lines[-1] == "4 passed, 3 failed, 1 skipped in 7 files, 1 s"
    run_gpu_tests._write(folder, (1, 1), {"gpus": 1}, 1, 2.0, list(found.values()))
    report = json.loads((folder / "summary.json").read_text())
    assert (report["passed"], report["failed"], report["skipped"]) == (4, 3, 1)
    [skipped] = [one for one in report["files"] if one["skipped"]]
    assert skipped["skips"] == {"needs a GPU": 1}
    seconds = json.loads((folder / "seconds.json").read_text())["1"]
    assert {"test_good.py", "test_skipped.py"} <= set(seconds)


def test_exit_code_under_torchrun():
    """It ends with 1 whatever its processes end with."""
    log = "1 skipped\nE1126 23:42:13.3 24 torch/api.py:1002] failed (exitcode: 5) local_rank: 0\n"
    assert exit_code(1, log) == 5
    assert exit_code(1, "1 failed, which is no exitcode: 5") == 1
    assert exit_code(-9, log.replace("5)", "-11)")) == -11


def test_files_that_did_not_run(run):
    """After a crash, and beyond the time of a job or of all."""
    found, _ = run(job_of("crash", "good"))
    assert found["crash"].ended == found["good"].ended == "exit code 3"
    assert found["good"].passed == 0
    found, _ = run(job_of("endless", "good"), limits=replace(LIMITS, job_seconds=6))
    assert found["endless"].passed == 1 and found["endless"].ended.startswith("killed after 6 s")
    assert found["good"].ended.startswith("killed")
    limits = replace(LIMITS, jobs=1, seconds=2)
    found, _ = run(job_of("endless"), job_of("good"), limits=limits)
    assert found["endless"].ended == "not over in time"
    assert found["good"].ended == "not started in time" and found["good"].is_bad


def test_alone_and_its_gpu(run, monkeypatch):
    """After all others; elsewhere jobs take the GPU that fewest use."""
    found, _ = run(job_of("good", alone=True), job_of("bad"), job_of("skipped"))
    assert list(found)[-1] == "good"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    limits = replace(LIMITS, memory_gib=5.0)
    given = environment_of(job_of("good"), [1], Path("out"), Path("report"), limits)
    assert given["CUDA_VISIBLE_DEVICES"] == "1" and given["ABSORBED_MLA_GPU_MEMORY_GIB"] == "5.0"
    alone = environment_of(job_of("good", alone=True), [0, 1], Path("out"), Path("x"), limits)
    assert alone["CUDA_VISIBLE_DEVICES"] == "0,1" and "ABSORBED_MLA_GPU_MEMORY_GIB" not in alone
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    named = environment_of(job_of("good"), [1], Path("out"), Path("report"), limits)
    assert named["CUDA_VISIBLE_DEVICES"] == "GPU-b"


def test_tests_in_jobs_of_their_own(run, tmp_path):
    """Each test runs once; a file's seconds are those of all its jobs."""
    one = "test_bad.py::test_b"
    results = []
    jobs = job_of("bad", left_out=(one,)), job_of("bad", tests=(one,))
    run(*jobs, limits=replace(LIMITS, jobs=1), say=results.append)
    assert [(one.passed, one.failed) for one in results] == [(1, 0), (0, 1)]
    results[0].seconds, results[1].seconds = 2, 3
    assert seconds_by_file(results) == {"test_bad.py": 5}
    results[1].ended = "killed"
    assert seconds_by_file(results) == {}


def test_half_a_line_of_a_report(tmp_path):
    row = {"test": "test_good.py::test_a", "outcome": "passed", "seconds": 1.0, "reason": ""}
    report = tmp_path / "report.jsonl"
    report.write_text(json.dumps(row) + "\n" + json.dumps(row)[:-9])
    [found] = results_of(job_of("good"), report, "killed", "log")
    assert (found.passed, found.ended) == (1, "killed")


def test_selected_files():
    """Nothing in the lists is missing, and no test for a GPU is left out."""
    for name in plan.CPU_ONLY:
        assert (ROOT / "tests/unit" / name).exists(), name
    selected = plan.unit_files(ROOT)
    assert {*plan.ALONE, *plan.DIVIDED} <= set(selected)
    tests = [f"{name}::{test}" for name, tests in plan.DIVIDED.items() for test in tests]
    for test in (*plan.LARGE, *tests):
        name, *_, function = test.partition("[")[0].split("::")
        assert f"def {function}(" in (ROOT / name).read_text(), test
    mark = re.compile(r"needs\.(gpu|hopper|gpu_with)\b|NEEDS_(GPU|HOPPER)\b")
    for path in {*(ROOT / "tests/unit").rglob("test_*.py")} - {Path(__file__).resolve()}:
        if mark.search(path.read_text()):
            assert path.relative_to(ROOT).as_posix() in selected, path
    assert plan.unit_files_of_several_gpus(ROOT) == ["tests/unit/serving/test_llm_gpu.py"]


def test_numbers_of_processes():
    counts = plan.process_counts
    assert counts("pytestmark = needs.processes(2, 4)") == {2, 4}
    assert counts("pytestmark = [needs.gpu, needs.processes(1)]\nx = 1") == {1}
    assert counts("@needs.processes(2)\ndef test_a(): ...\npytestmark = needs.gpu") == set()
    names = {count: plan.distributed_files(ROOT, count) for count in (1, 2, 4)}
    only_two = "tests/distributed/test_fully_shard.py"
    assert [only_two in names[count] for count in (1, 2, 4)] == [False, True, False]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_file_is_in_one_job_of_one_shard(gpus):
    jobs = jobs_of(ROOT, gpus, {})
    files = [name for job in jobs for name in job.files]
    assert jobs == sorted(jobs, key=lambda job: (job.alone, -job.seconds)), "longest first"
    expected = plan.distributed_files(ROOT, gpus)
    assert set(expected) <= set(files)
    # A file of several jobs has one that runs all that the others do not.
    whole = [name for job in jobs if not job.tests for name in job.files]
    assert sorted(whole) == sorted(set(files))
    tests = [test for job in jobs for test in job.tests]
    assert sorted(tests) == sorted(test for job in jobs for test in job.left_out)
    shards = [shard_of(jobs, number, 3) for number in (1, 2, 3)]
    assert sorted(name for jobs in shards for job in jobs for name in job.files) == sorted(files)
    times = [sum(job.seconds for job in shard) for shard in shards]
    assert max(times) - min(times) <= max(job.seconds for job in jobs)


def test_short_files_share_a_process():
    names = plan.unit_files(ROOT)
    jobs = jobs_of(ROOT, 1, dict.fromkeys(names, 1.0))
    unit = [job for job in jobs if not (job.processes or job.tests)]
    assert sum(len(job.files) for job in unit) == len(names) > 5 * len(unit)
    assert all(job.seconds <= plan.START + plan.TOGETHER for job in unit)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--shard", "3/2"], "--shard must be K/N with K from 1 to N, got 3/2"),
        (["--jobs", "0"], "--jobs must be above 0, got 0"),
        (["--job-seconds", "-1"], "--job-seconds must be above 0, got -1"),
    ],
)
def test_mistakes(words, error, capsys, tmp_path):
    assert run_gpu_tests.main([*words, str(tmp_path)]) == 2
    assert error in capsys.readouterr().err


def test_no_gpu(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(run_gpu_tests, "_environment", lambda: {"gpus": 0})
    assert run_gpu_tests.main([str(tmp_path)]) == 2
    assert "no CUDA GPU is visible" in capsys.readouterr().err
