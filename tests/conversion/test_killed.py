"""kill -9 at every kind of step and at any moment: the source stays, the target is whole or absent.

``KILL_COUNT`` sets how often each of the tests kills; the default keeps them short.
"""

import hashlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_conversion.formats import TARGETS
from checkpoint_conversion.manifest import NAME
from tests.conversion.processes import Done, Process, run
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face

KILLS = int(os.environ.get("KILL_COUNT", "4"))
# With one thread the steps come in the same order every time.
ONE_THREAD = ("--workers", "1")
# Each target in several parts.
SHARDS = ("--max-shard-size", "20kB")


class Conversion:
    """One command line, run again and again into one target, which writes into ``folder`` only."""

    def __init__(self, folder: Path, source: Path, to: str, *options: str) -> None:
        self.folder, self.source, self.to = folder, source, to
        self.target = folder / "targets" / "out"
        self.options = options
        self.source_before = contents(source)

    def command(self, target: Path, *options: str) -> tuple:
        return ("convert", self.source, target, "--to", self.to, *self.options, *options)

    def direct(self) -> tuple[dict[str, str], Done]:
        """What an uninterrupted conversion writes, and how it went."""
        done = run(self.folder / "direct", *self.command(self.folder / "whole"))
        assert done.code == 0, done.err
        whole = contents(self.folder / "whole")
        assert any(Path(name).name == NAME for name in whole), "the manifest is compared, too"
        return whole, done

    def clear(self) -> None:
        shutil.rmtree(self.target.parent, ignore_errors=True)
        shutil.rmtree(self.folder / "output", ignore_errors=True)

    def write_old(self) -> dict[str, str]:
        """Make the target that is to be replaced, of another dtype."""
        command = self.command(self.folder / "old", "--dtype", "fp32")
        assert run(self.folder / "output", *command).code == 0
        self.restore_old()
        return contents(self.target)

    def restore_old(self) -> None:
        self.clear()
        shutil.copytree(self.folder / "old", self.target)

    def run(self, *options: str, **how) -> Done:
        return run(self.folder / "output", *self.command(self.target, *options), **how)

    def start(self, *options: str) -> Process:
        return Process(self.folder / "output", *self.command(self.target, *options))

    def check_resumed(self, whole: dict[str, str]) -> None:
        """``--resume`` makes the same as if nothing had happened, and leaves nothing behind."""
        done = self.run("--resume")
        assert done.code == 0, done.err
        assert contents(self.target) == whole
        assert [path.name for path in self.target.parent.iterdir()] == ["out"]
        assert contents(self.source) == self.source_before


def contents(folder: Path) -> dict[str, str]:
    """A checksum of every file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """In memory where it can be: a kill leaves the same there, and waiting for a disk is slow."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def larger_source(tmp_path_factory) -> Path:
    """30 MB, so that a conversion takes long enough to be hit in the middle."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 512}
    config = tiny_config(vocab_size=4096, **sizes)
    folder = tmp_path_factory.mktemp("killed") / "source"
    return write_hugging_face(folder, config, random_tensors(config))


@pytest.mark.parametrize("to", TARGETS)
def test_killed_at_chosen_steps(tiny_folder, folder, to):
    """Spread over all steps, from the first folder that is made to the last one removed."""
    conversion = Conversion(folder, tiny_folder, to, *SHARDS, *ONE_THREAD)
    whole, done = conversion.direct()
    assert done.steps > 20
    states = []
    for step in sorted({1 + i * (done.steps - 1) // (KILLS - 1) for i in range(KILLS)}):
        conversion.clear()
        killed = conversion.run(kill_at=step)
        assert killed.code == -9, f"step {step}: {killed}"
        assert contents(tiny_folder) == conversion.source_before
        states.append(conversion.target.exists())
        if states[-1]:
            assert contents(conversion.target) == whole, f"step {step}"
        conversion.check_resumed(whole)
    # The last step comes after the target has got its name.
    assert states[0] is False and states[-1] is True
    assert states == sorted(states)


def test_killed_at_random_moments(larger_source, folder, record_property):
    """With two threads, whose order differs from run to run; killed twice before it may finish."""
    conversion = Conversion(folder, larger_source, "hf", "--max-shard-size", "2MB")
    whole, _ = conversion.direct()
    conversion.clear()
    start = time.monotonic()
    assert conversion.run().code == 0
    duration = time.monotonic() - start
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    killed = 0
    for _ in range(KILLS):
        conversion.clear()
        for options in ((), ("--resume",)):
            process = conversion.start(*options)
            time.sleep(moments.uniform(0, duration))
            process.kill()
            if process.wait().code == -9:
                killed += 1
            else:
                # The machine was busier when the time was taken.
                duration /= 2
            assert contents(larger_source) == conversion.source_before
            if conversion.target.exists():
                assert contents(conversion.target) == whole, seed
        conversion.check_resumed(whole)
    record_property("kills", killed)
    assert killed > KILLS // 2, f"{killed} were killed in time, of {2 * KILLS}"


@pytest.fixture
def replacing(tiny_folder, folder) -> tuple[Conversion, dict[str, str], dict[str, str], int]:
    """A conversion with --force, its target, what is there before, and how many steps it takes."""
    conversion = Conversion(folder, tiny_folder, "hf", *SHARDS, *ONE_THREAD, "--force")
    whole, _ = conversion.direct()
    old = conversion.write_old()
    return conversion, whole, old, conversion.run().steps


def test_killed_while_replacing(replacing):
    """The old target is there, or its successor, or the next start brings the old one back."""
    conversion, whole, old, steps = replacing
    found = []
    # From just before the two renames into the removal of the old one.
    for step in range(steps - len(old) - 10, steps - len(old)):
        conversion.restore_old()
        assert conversion.run(kill_at=step).code == -9
        if conversion.target.exists():
            now = contents(conversion.target)
            assert now in (old, whole), f"step {step}"
            found.append("new" if now == whole else "old")
        else:
            found.append("moved")
            # Any command on the target looks after it, even one that is refused.
            assert conversion.run("--dtype", "fp16", "--resume").code == 3
            assert contents(conversion.target) == old
        conversion.check_resumed(whole)
    assert found == sorted(found, key=["old", "moved", "new"].index)
    assert found.count("moved") == 1


def test_interrupted_by_the_user(larger_source, folder):
    """Ctrl-C says how to go on, and a script sees it from the exit code."""
    conversion = Conversion(folder, larger_source, "hf", "--max-shard-size", "1MB")
    whole, _ = conversion.direct()
    steps = conversion.run().steps
    conversion.clear()
    # Ctrl-C sends the signal to a process that is in the middle of its work.
    done = conversion.run(kill_at=steps // 2, by=signal.SIGINT)
    assert done.code == 130, done
    assert "interrupted" in done.err and "--resume" in done.err
    assert not conversion.target.exists()
    conversion.check_resumed(whole)


def test_interrupted_when_all_is_done(replacing):
    """Whoever is told "interrupted" has no new target; whoever has one is told that it is done."""
    conversion, whole, old, steps = replacing
    ends = []
    # From before the renames to the last file of the old target that is removed.
    for step in range(steps - len(old) - 10, steps + 1, 2):
        conversion.restore_old()
        done = conversion.run(kill_at=step, by=signal.SIGINT)
        ends.append(done.code)
        if done.code == 130:
            assert contents(conversion.target) == old, f"step {step}"
            assert "--resume" in done.err
            continue
        assert done.code == 0, f"step {step}: {done}"
        assert contents(conversion.target) == whole, f"step {step}"
        assert [path.name for path in conversion.target.parent.iterdir()] == ["out"], f"step {step}"
        assert "interrupted when the conversion was complete" in done.err
        assert "error" not in done.err
    assert ends == sorted(ends, reverse=True)
    assert {*ends} == {0, 130}
