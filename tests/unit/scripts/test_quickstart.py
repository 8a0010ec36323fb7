"""What scripts/quickstart.py trains on, prints and compares; tests/readme runs all of it."""

import os
import shlex
import subprocess
import sys

import pytest

import quickstart
from console.script import Failure
from counting import WORDS, continuation, count_from, right_numbers, write_texts


def test_a_folder_that_cannot_be_written(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--output", "/proc/no"])
    assert quickstart.main() == 2
    assert "--output /proc/no cannot be written" in capsys.readouterr().err


class TestCounting:
    def test_it_goes_around(self):
        assert count_from(98, 4) == "ninety-eight, ninety-nine, zero, one"

    def test_texts_count_and_are_the_same_everywhere(self, tmp_path):
        write_texts(tmp_path / "a")
        write_texts(tmp_path / "b")
        files = sorted((tmp_path / "a").iterdir())
        assert len(files) == 200
        for file in files:
            text = file.read_text()
            assert text == (tmp_path / "b" / file.name).read_text()
            first = WORDS.index(text.split(",")[0])
            assert text == count_from(first, 40) + "\n"
        # Random beginnings, or the model would learn the texts and not to count.
        assert len({file.read_text() for file in files}) > 50

    def test_continuation(self):
        assert continuation("sixty-eight, ", 25) == "sixty-nine, seventy, seve"
        assert continuation("ninety-eight, ninety-nine, ", 9) == "zero, one"

    @pytest.mark.parametrize("prompt", ["", "hello, ", "one, two"])
    def test_what_has_no_continuation(self, prompt):
        with pytest.raises(ValueError, match="must end with a number and a comma"):
            continuation(prompt, 10)

    @pytest.mark.parametrize(
        "text, right",
        [
            ("four, five, six, sev", (3, 3)),
            ("four, five, sixty, sev", (2, 3)),
            ("thirty-four, five, six, ", (2, 3)),
            ("    ", (0, 0)),
        ],
    )
    def test_right_numbers(self, text, right):
        assert right_numbers(text, "two, three, ") == right


class TestPrintedCommands:
    """They are pasted into an activated shell, so the shell must read them as they are meant."""

    @staticmethod
    def printed(command, **variables) -> list[str]:
        return shlex.split(quickstart.shown(command, variables))

    def test_words_survive_the_shell(self):
        prompt = 'def main($HOME, it\'s `a` "b"; '
        command = [*quickstart.TORCHRUN, "--x", "a folder/b", "--prompt", prompt]
        assert self.printed(command) == ["torchrun", *command[len(quickstart.TORCHRUN) :]]

    def test_a_shell_gives_the_same_words(self):
        line = quickstart.shown([*quickstart.CONVERTER, "a b", "(c)"])
        stub = 'absorbed-mla-convert() { printf "%s|" "$@"; }; ' + line
        done = subprocess.run(["bash", "-c", stub], capture_output=True, text=True, check=True)
        assert done.stdout == "a b|(c)|"

    def test_paths_are_seen_from_the_current_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        inside, outside = f"{tmp_path}/output/x", f"{tmp_path}er/x"
        assert self.printed(["ls", inside, outside]) == ["ls", "output/x", outside]

    def test_what_is_printed_is_what_runs(self, capfd, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)  # the interpreter may lie below the folder it was started in
        command = [sys.executable, "-c", "import os, sys; print(sys.argv[1:])", "a b"]
        quickstart._run(command)
        line, ran = capfd.readouterr().out.splitlines()
        assert shlex.split(line.removeprefix("$ ")) == command
        assert ran == "['a b']"

    def test_a_failure_names_the_command(self):
        with pytest.raises(Failure, match=f"{os.path.basename(sys.executable)} -c 'exit"):
            quickstart._run([sys.executable, "-c", "exit(3)"])
