"""Packages of a program that have the names of ours, and come before them on sys.path."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.environment import run_python

ROOT = Path(__file__).resolve().parents[3]
REQUIRE = "from absorbed_mla.own_packages import require_own_packages as r; r({name!r})"


def run(tmp_path: Path, program: str, *first: Path) -> subprocess.CompletedProcess:
    """Run a program from another folder, with ``first`` before the checkout on sys.path."""
    return run_python("-c", program, path=[*first, ROOT], cwd=tmp_path)


@pytest.fixture
def hiding(tmp_path) -> Path:
    """A folder with regular packages of both names, which must not run."""
    for name in ("specs", "checkpoint_conversion"):
        (tmp_path / "theirs" / name).mkdir(parents=True)
        (tmp_path / "theirs" / name / "__init__.py").write_text("raise SystemExit('it ran')\n")
    return tmp_path / "theirs"


def says(text: str, name: str, found: Path) -> None:
    """Check the one line that says whose package was found, and what to do."""
    line = text.strip().splitlines()[-1]
    assert f"absorbed_mla needs its package {name!r} in {ROOT / name}, but" in line
    remedy = f"put {ROOT} before" if name == "checkpoint_conversion" else "remove its __init__.py"
    assert f"finds {found}: rename the other one, or {remedy}" in line


@pytest.mark.parametrize("name", ["specs", "checkpoint_conversion"])
class TestFound:
    def test_ours(self, name, tmp_path):
        assert run(tmp_path, REQUIRE.format(name=name)).returncode == 0

    def test_a_package(self, name, tmp_path, hiding):
        done = run(tmp_path, REQUIRE.format(name=name), hiding)
        assert done.returncode == 1
        says(done.stderr, name, hiding / name)

    def test_a_module(self, name, tmp_path):
        (tmp_path / f"{name}.py").touch()
        says(run(tmp_path, REQUIRE.format(name=name)).stderr, name, Path(f"{tmp_path}/{name}.py"))


def test_the_remedies(tmp_path, hiding):
    """What the messages say to do helps."""
    program = REQUIRE.format(name="checkpoint_conversion")
    assert run(tmp_path, program, ROOT, hiding).returncode == 0
    program = REQUIRE.format(name="specs") + "; import specs.absorbed_mla_layer_specs"
    assert run(tmp_path, program, ROOT, hiding).returncode == 1
    (hiding / "specs" / "__init__.py").unlink()
    assert run(tmp_path, program, hiding).returncode == 0


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("import absorbed_mla.serving.export", "checkpoint_conversion"),
        ("import absorbed_mla.bridge", "specs"),
        ("import absorbed_mla.bridge", "checkpoint_conversion"),
        ("import absorbed_mla.bridge.everywhere", "checkpoint_conversion"),
        ("from absorbed_mla import LLM; LLM('a folder')", "checkpoint_conversion"),
        ("from absorbed_mla import LLM; LLM.from_model(None)", "checkpoint_conversion"),
    ],
    ids=["export", "bridge", "bridge", "bridges", "LLM", "live model"],
)
def test_what_imports_them(program, name, tmp_path, hiding):
    other = {"specs", "checkpoint_conversion"} - {name}
    shutil.rmtree(hiding / other.pop())
    done = run(tmp_path, program, hiding)
    assert "ValueError: " in done.stderr
    says(done.stderr, name, hiding / name)


@pytest.mark.parametrize(
    ("program", "start", "code"),
    [
        ("from absorbed_mla.convert_command import main; sys.exit(main())", "error: ", 3),
        (
            "from absorbed_mla.serving.server.cli import main; sys.exit(main(['x']))",
            "absorbed-mla-serve: error: ",
            2,
        ),
        (
            f"import runpy; sys.path.append({str(ROOT / 'scripts')!r}); sys.argv = ['train.py']; "
            f"runpy.run_path({str(ROOT / 'scripts/train.py')!r}, run_name='__main__')",
            "train.py: error: ",
            2,
        ),
    ],
    ids=["convert", "serve", "train"],
)
def test_commands_print_one_line(program, start, code, tmp_path, hiding):
    done = run(tmp_path, f"import sys; {program}", hiding)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith(start)
    says(done.stderr, "checkpoint_conversion", hiding / "checkpoint_conversion")
