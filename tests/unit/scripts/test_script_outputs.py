"""Scripts check before they begin to work that all their output files can be written.

If these fail, a mistyped folder loses the results of a run of hours.
"""

import errno
import tempfile
from pathlib import Path

import pytest

from benchmarks.attention import AttentionBenchmark
from benchmarks.context_parallel import CPBenchmark
from benchmarks.decode import DecodeBenchmark
from checks import oracle_report
from console.outputs import require_writable
from rollout import gap_entry
from rollout.entry import main as rollout_train
from training.entry import main as train


@pytest.fixture
def file(tmp_path) -> Path:
    """An existing file, for options that need a folder."""
    path = tmp_path / "file"
    path.write_text("mine")
    return path


class TestRequireWritable:
    def test_nothing_is_left_behind(self, tmp_path):
        (tmp_path / "there").mkdir()
        (tmp_path / "kept.json").write_text("old")
        before = sorted(tmp_path.rglob("*"))
        folders = {"--save": tmp_path / "a" / "b", "--load": tmp_path / "there", "--none": None}
        files = {"--json": tmp_path / "kept.json", "--plot": str(tmp_path / "c" / "plot.png")}
        require_writable(folders=folders, files=files)
        assert sorted(tmp_path.rglob("*")) == before
        assert (tmp_path / "kept.json").read_text() == "old"

    @pytest.mark.parametrize(
        ("kind", "path", "reason"),
        [
            ("folders", "file", "not a folder$"),
            ("files", ".", "Is a directory$"),
            *(
                (kind, path, reason)
                for kind in ("folders", "files")
                for path, reason in (
                    ("file/inside", "(not a folder|Not a directory)"),
                    ("/proc/no/where", "No such file"),
                    ("", "empty string"),
                )
            ),
        ],
    )
    def test_refused(self, file, monkeypatch, kind, path, reason):
        monkeypatch.chdir(file.parent)
        with pytest.raises(ValueError, match=f"^--out .*{reason}"):
            require_writable(**{kind: {"--out": path}})

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
    def test_folders_of_which_the_system_says_so(self, tmp_path, monkeypatch, code):
        """A disk without room, where empty files can still be created; a folder of others."""
        reason = {errno.ENOSPC: "No space left on device", errno.EACCES: "Permission denied"}[code]

        class Full:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def write(self, _):
                raise OSError(code, reason)

        def opened(dir):
            if code == errno.EACCES:
                raise PermissionError(code, reason, str(dir))
            return Full()

        monkeypatch.setattr(tempfile, "TemporaryFile", opened)
        with pytest.raises(ValueError, match=f"--save .* cannot be written: {reason}$"):
            require_writable(folders={"--save": tmp_path / "new"})
        assert not list(tmp_path.iterdir())

    def test_only_rank_0_tries(self, file, monkeypatch):
        """Others may be on machines without that disk, and would remove each other's folders."""
        monkeypatch.setenv("RANK", "1")
        require_writable(folders={"--save": file})


def script(main, *argv: str):
    """A function that runs a script with a path as its last argument."""
    return lambda path: main([*argv, str(path)])


def folder_first(main, *argv: str):
    return lambda path: main([str(path), *argv])


FILES = {
    "train --metrics": script(train, "--metrics"),
    "train --plot": script(train, "--plot"),
    "rollout_train --metrics": script(rollout_train, "--metrics"),
    "rollout_train --plot": script(rollout_train, "--plot"),
    "rollout_gap --json": script(gap_entry.main, "--json"),
    "decode --json": script(DecodeBenchmark.main, "--device", "cpu", "--json"),
    "decode --plot": script(DecodeBenchmark.main, "--device", "cpu", "--plot"),
}
FOLDERS = {
    "train --save": script(train, "--save"),
    "rollout_train --save": script(rollout_train, "--save"),
    "attention": folder_first(AttentionBenchmark.main, "--device", "cpu"),
    "context_parallel": folder_first(CPBenchmark.main),
}


@pytest.fixture
def one_line(file, capsys, monkeypatch):
    """Run a script with a path that cannot be written; that must be the only line it prints."""
    monkeypatch.delenv("RANK", raising=False)

    def run(start, path: Path) -> None:
        assert start(path) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert f"{path} cannot be written" in err
        assert file.read_text() == "mine"

    return run


@pytest.mark.parametrize("name", FILES | FOLDERS)
def test_scripts(one_line, file, name):
    one_line((FILES | FOLDERS)[name], file.parent if name in FILES else file)
    one_line((FILES | FOLDERS)[name], file / "inside" / "it")


def test_oracle_report(one_line, file):
    table = file.with_name("table.jsonl")
    table.write_text('{"device": "cpu"}\n')
    one_line(lambda path: oracle_report.main([str(path), str(table)]), file.parent)
