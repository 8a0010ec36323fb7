"""quickstart.sh and run_tests.sh on machines without Python, disk space, network or a free folder.

Stubs stand in for python and df; nothing is installed.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
TOOLS = ("awk", "bash", "cat", "cp", "df", "dirname", "flock", "getent", "grep", "ls", "mkdir")
TOOLS += ("rm", "tail", "touch", "uname")

# Answers what environment.sh asks Python, and logs the command lines of pip.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) echo "$STUB_VERSION" ;;
  *sys.executable*) echo "$0" ;;
  "-m venv "*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  "-m pip install "*)
    echo "$*" >>"$STUB_PIP_LOG"
    if [ -n "$STUB_PIP_ERROR" ]; then echo "$STUB_PIP_ERROR"; exit 1; fi ;;
esac
"""
CASE = 'case "$*" in'
NO_VENV = PYTHON.replace(CASE, f'{CASE}\n  *"import venv"*) exit 1 ;;')
# The environment's has no pip, and is installed into from outside.
NO_PIP = PYTHON.replace(
    CASE, f'{CASE}\n  "-c import pip") [[ $0 != *"/an environment/"* ]]; exit ;;'
).replace('"-m pip install "*)', '"-m pip "*)')

# Tests of three layers: some fail in the first one, and the last one ends before it has run any.
LAYERS = """#!/bin/bash
case "$*" in
  *"pytest tests/training"*) echo "2 failed, 4 passed in 0.10s"; exit 1 ;;
  *"pytest tests/readme"*) echo "3 passed in 0.10s" ;;
  *"pytest tests/distributed"*) exit 1 ;;
esac
"""


class Machine:
    """A PATH with a few tools, to which a test adds stubs of Python."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            if path := shutil.which(tool):
                (self.bin / tool).symlink_to(path)
        self.pip_log, self.environment = folder / "pip.log", folder / "an environment"
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "ABSORBED_MLA_ENV": str(self.environment),
            "STUB_PIP_LOG": str(self.pip_log),
            "STUB_PIP_ERROR": "",
        }

    def add(self, name: str, script: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def add_python(self, version: str, script: str = PYTHON) -> None:
        self.env["STUB_VERSION"] = version
        self.add(f"python{version}", script)

    def bash(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [shutil.which("bash"), *command],
            cwd=self.bin.parent,
            env=self.env,
            capture_output=True,
            text=True,
        )

    def prepare(self) -> subprocess.CompletedProcess:
        """Run prepare_environment; its interpreter is the last line of stdout."""
        script = f'set -euo pipefail; source "{SCRIPTS}/environment.sh"; prepare_environment; '
        return self.bash("-c", script + 'printf "%s\\n" "$PYTHON"')

    def prepared(self) -> str:
        done = self.prepare()
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    def pip_calls(self) -> list[str]:
        return self.pip_log.read_text().splitlines() if self.pip_log.exists() else []


@pytest.fixture
def bare(tmp_path) -> Machine:
    """Without any Python."""
    return Machine(tmp_path)


@pytest.fixture
def machine(bare) -> Machine:
    bare.add_python("3.11")
    return bare


def assert_one_line_error(done: subprocess.CompletedProcess, *parts: str) -> None:
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def old_python(machine: Machine) -> None:
    machine.add_python("3.9")
    machine.add("python3", PYTHON)


def full_disk(machine: Machine) -> None:
    machine.add_python("3.11")
    machine.add("df", "#!/bin/bash\nprintf 'x x x Available\\nx x x 2000000\\n'\n")


def failing_pip(said: str) -> Callable[[Machine], None]:
    def prepare(machine: Machine) -> None:
        machine.add_python("3.11")
        machine.env["STUB_PIP_ERROR"] = said

    return prepare


class TestEnvironment:
    def test_made_once_and_then_reused(self, machine):
        """The second run must work without a network, so it may not call pip."""
        for _ in range(2):
            assert machine.prepared() == str(machine.environment / "bin/python")
            calls = machine.pip_calls()
            assert len(calls) == 4
        # Which index is used is the user's configuration of pip.
        assert not any("index" in call or "://" in call for call in calls)
        # The project is installed, so that an activated shell has its modules and commands.
        assert {"--no-deps", "--no-build-isolation", "--editable"} <= set(calls[-1].split())
        assert calls[-1].endswith(str(SCRIPTS.parent))

    @pytest.mark.parametrize("other", ["none", "another checkout's", "another version's"])
    def test_the_project_is_installed_into_an_older_environment(self, machine, other):
        machine.prepare()
        before = machine.pip_calls()
        stamp = machine.environment / ".absorbed-mla-project"
        text = stamp.read_text()
        if other == "none":
            stamp.unlink()
        else:
            old = str(SCRIPTS.parent) if "checkout" in other else "absorbed-mla-convert"
            assert old in text
            stamp.write_text(text.replace(old, "something-else"))
        for _ in range(2):
            machine.prepared()
            assert machine.pip_calls() == [*before, before[-1]]

    def test_a_failed_installation_of_the_project_is_tried_again(self, machine):
        machine.prepare()
        (machine.environment / ".absorbed-mla-project").unlink()
        machine.env["STUB_PIP_ERROR"] = "ERROR: killed"
        assert_one_line_error(machine.prepare(), "killed", "--editable")
        machine.env["STUB_PIP_ERROR"] = ""
        machine.prepared()
        assert len(machine.pip_calls()) == 6

    def test_an_environment_without_pip_uses_the_one_it_was_made_by(self, bare):
        bare.add_python("3.12", NO_PIP)
        bare.prepared()
        calls = bare.pip_calls()
        assert len(calls) == 4
        assert all(f"pip --python {bare.environment}/bin/python install" in c for c in calls)

    @pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
    def test_python_requirement_is_ignored_on_3_11_only(self, bare, version):
        bare.add_python(version)
        bare.prepare()
        (megatron,) = (call for call in bare.pip_calls() if "megatron-core" in call)
        assert ("--ignore-requires-python" in megatron) == (version == "3.11")
        # Without its dependencies: pip would look for other versions of them.
        assert ("--no-deps" in megatron) == (version == "3.11")

    def test_half_made_environment_is_made_anew(self, machine):
        machine.env["STUB_PIP_ERROR"] = "ERROR: killed"
        assert_one_line_error(machine.prepare(), "killed")
        leftover = machine.environment / "leftover"
        leftover.touch()
        machine.env["STUB_PIP_ERROR"] = ""
        machine.prepared()
        assert not leftover.exists()

    def test_other_requirements_make_it_anew(self, machine):
        machine.prepare()
        (machine.environment / ".absorbed-mla-requirements").write_text("torch==1.0\n")
        machine.prepare()
        assert len(machine.pip_calls()) == 8

    def test_somebody_elses_folder_is_left_alone(self, machine):
        machine.environment.mkdir()
        (machine.environment / "thesis.tex").touch()
        assert_one_line_error(machine.prepare(), str(machine.environment), "ABSORBED_MLA_PYTHON")
        assert (machine.environment / "thesis.tex").exists()

    @pytest.mark.parametrize(
        ("lacking", "parts"),
        [
            (lambda machine: None, ["Python 3.11 to 3.14", "Found: none"]),
            (old_python, ["Python 3.11 to 3.14", "python3 is 3.9"]),
            (lambda m: m.add_python("3.12", NO_VENV), ["python3.12 is 3.12 without venv and pip"]),
            (full_disk, ["needs 3 GB", "2 GB are free", "ABSORBED_MLA_ENV"]),
            (
                lambda machine: machine.add("uname", "#!/bin/bash\necho Darwin\n"),
                ["Linux only; this is Darwin"],
            ),
            (
                lambda machine: machine.env.update(ABSORBED_MLA_PYTHON="/no/such/python"),
                ["ABSORBED_MLA_PYTHON=/no/such/python"],
            ),
            (failing_pip("NewConnectionError('refused')"), ["package index cannot be reached."]),
            (failing_pip("OSError: [Errno 28] No space left on device"), ["disk filled up"]),
            (failing_pip("ERROR: No matching distribution for torch"), ["No matching distr"]),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_what_is_lacking_is_one_line(self, bare, lacking, parts):
        lacking(bare)
        assert_one_line_error(bare.prepare(), *parts)
        assert bare.pip_calls() or not bare.environment.exists()

    def test_given_interpreter_is_used_as_it_is(self, machine):
        machine.env["ABSORBED_MLA_PYTHON"] = str(machine.bin / "python3.11")
        assert machine.prepared() == str(machine.bin / "python3.11")
        assert machine.pip_calls() == []


class TestCommandLines:
    @pytest.mark.parametrize("script", ["run_tests.sh", "quickstart.sh"])
    def test_help_needs_nothing(self, bare, script):
        done = bare.bash(str(SCRIPTS / script), "--help")
        assert done.returncode == 0
        assert done.stdout.startswith(f"Usage: bash scripts/{script}")
        assert not bare.environment.exists()

    @pytest.mark.parametrize(
        "command, error",
        [
            ("run_tests.sh --fast", "unknown option --fast"),
            ("run_tests.sh gpu", "unknown layer gpu"),
            ("run_tests.sh --fail-under most", "--fail-under takes a whole percentage"),
            ("run_tests.sh -k", "-k takes a pytest expression"),
            ("run_tests.sh --quick unit", "--quick takes no LAYER, got unit"),
            ("quickstart.sh --fast", "unknown option --fast"),
            ("quickstart.sh --train-iters few", "--train-iters takes a number"),
            ("quickstart.sh --train-iters 9", "at least 10, got '9'"),
            ("quickstart.sh --output", "--output takes a folder"),
            ("quickstart.sh --output /proc/no", "cannot create --output /proc/no"),
        ],
    )
    def test_errors_come_before_any_work(self, bare, command, error):
        script, *arguments = command.split()
        assert_one_line_error(bare.bash(str(SCRIPTS / script), *arguments), error)
        assert not bare.environment.exists()

    def test_a_layer_that_fails_hides_no_other(self, bare):
        bare.add("layers", LAYERS)
        command = ["bash", str(SCRIPTS / "run_tests.sh"), "training", "readme", "distributed-2"]
        env = {**os.environ, "ABSORBED_MLA_PYTHON": str(bare.bin / "layers")}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 1
        end = done.stdout.splitlines()[-3:]
        assert end == ["training failed", "distributed-2 failed", "7 passed, 3 failed"]

    def test_ci_runs_the_command(self):
        script = (SCRIPTS.parent / ".ci/run").read_text()
        assert script.splitlines()[-1] == "exec bash scripts/run_tests.sh"
        assert os.access(SCRIPTS.parent / ".ci/run", os.X_OK)
