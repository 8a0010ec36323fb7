"""``LLM`` in processes of its own: from a plain script, and when processes die."""

import glob
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest
import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.executor.multiprocess import EngineDeadError, ProcessRunner, picklable
from absorbed_mla.serving.llm_options import LLMOptions
from checkpoint_conversion.errors import CheckpointError
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.support import needs
from tests.support.environment import without_launcher
from tests.support.hub_cache import as_snapshot
from tests.support.llm import ctrl_c_interrupts, tiny_folder, until

# Scripts start their ranks with an interpreter of its own each.
pytestmark = [needs.no_gpu, pytest.mark.usefixtures("forked_python")]

OPTIONS = {"tokenizer": "bytes", "max_num_seqs": 4, "parity": True}
PROMPTS = ["An", "the quick brown fox"]
PARAMS = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
# Without a __main__ guard.
SCRIPT = """\
import sys
from absorbed_mla import LLM, SamplingParams
options = {"tokenizer": "bytes", "parity": True, "tensor_parallel_parts": 4}
llm = LLM(sys.argv[1], tensor_parallel_size=int(sys.argv[2]), **options)
params = SamplingParams(max_tokens=int(sys.argv[3]), seed=5, ignore_eos=True, logprobs=2)
print(*llm._runner.process_ids(), flush=True)
for output in llm.generate(["An", "the quick brown fox"], params, use_tqdm=False):
    print(output.outputs[0].token_ids, output.outputs[0].logprobs, flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """No process of this test, dead or alive, and no file."""
    # One forks the programs of tests.
    before = {*psutil.Process().children()}
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    until(lambda: not {*psutil.Process().children()} - before, 5)
    until(lambda: not glob.glob(f"{tmp_path}/absorbed_mla_*"), 5)


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run_script(folder: Path, processes: int, tokens: int = 8) -> subprocess.Popen:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(processes), str(tokens)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=without_launcher())


def test_heartbeat_of_a_busy_process(tmp_path):
    """It beats while Python computes, as during a long prefill: nobody takes it for hung."""
    busy = f"worker._end_with_parent({str(tmp_path)!r})\nend = time.time() + 2\n"
    busy += "while time.time() < end: sum(range(10**6))"
    code = f"import time\nfrom absorbed_mla.serving.executor import worker\n{busy}"
    log, silence = tmp_path / "log", []
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=out)
    first = log.stat().st_mtime
    until(lambda: log.stat().st_mtime > first, 30)
    while process.poll() is None:
        silence.append(time.time() - log.stat().st_mtime)
        time.sleep(0.05)
    assert process.returncode == 0 and log.stat().st_mtime > first + 1 and max(silence) < 2


def test_plain_script_and_close(folder, tmp_path):
    """Two processes generate what one does, whose model is a snapshot in the hub's cache.

    With ``tensor_parallel_parts`` log-probabilities are equal to the bit. ``close`` may be called
    twice.
    """
    script = run_script(folder, 2)
    with LLM(as_snapshot(folder, tmp_path / "hub"), **OPTIONS, tensor_parallel_parts=4) as llm:
        outputs = llm.generate(PROMPTS, PARAMS.replace(logprobs=2), use_tqdm=False)
        expected = [f"{one.outputs[0].token_ids} {one.outputs[0].logprobs}" for one in outputs]
        llm.require_no_leak()
        llm.check()
        # A process that ends while nothing runs is found, too.
        [pid] = llm._runner.process_ids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="the process of rank 0 has ended with code -9"):
            until(llm.check)
    llm.close()
    with pytest.raises(EngineDeadError, match="the processes of the model have ended"):
        llm.check()
    out, _ = script.communicate(timeout=120)
    assert script.returncode == 0
    ids, *lines = out.splitlines()
    assert lines == expected
    assert not any(psutil.pid_exists(int(pid)) for pid in ids.split())


def test_prefixes_outlive_the_processes(folder, tmp_path):
    """They are written when the processes are told to end, and read by the next ones."""
    options = {**OPTIONS, "prefix_cache_dir": tmp_path / "prefixes"}
    found = []
    for _ in range(2):
        with LLM(folder, **options) as llm:
            outputs = llm.generate(["to be continued " * 5], PARAMS, use_tqdm=False)
            found.append((tokens_of(outputs), llm.statistics().disk_blocks))
    assert found[0][0] == found[1][0]
    assert [blocks for _, blocks in found] == [0, 1]


def test_killed_rank(folder):
    """Whoever waits learns which rank it was, and so does everybody who comes later."""
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        processes = [psutil.Process(pid) for pid in llm._runner.process_ids()]
        stream = llm.stream(PROMPTS, PARAMS.replace(max_tokens=400))
        next(stream)
        processes[1].kill()
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match="the process of rank 1 has ended with code -9"):
            for _ in stream:
                pass
        assert not any(process.is_running() for process in processes)
        assert time.monotonic() - begin < 10
        for call in (llm.step, llm.statistics, llm.check, lambda: llm.generate("more")):
            with pytest.raises(EngineDeadError, match="have ended"):
                call()


def test_killed_parent(folder):
    """Nobody is there to end its rank, or to remove its files."""
    script = run_script(folder, 1, tokens=400)
    ranks = [psutil.Process(int(pid)) for pid in script.stdout.readline().split()]
    assert len(ranks) == 1
    time.sleep(0.5)
    script.send_signal(signal.SIGKILL)
    script.communicate()
    until(lambda: not any(rank.is_running() for rank in ranks))


def test_ctrl_c(folder, monkeypatch):
    """It reaches all processes of a terminal; the call ends after its step, the model goes on."""
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        expected = tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        step, steps = llm._runner.step, []

        def press(commands):
            steps.append(commands)
            if len(steps) % 3 == 0:
                for pid in (*llm._runner.process_ids(), os.getpid()):
                    os.kill(pid, signal.SIGINT)
            return step(commands)

        long = PARAMS.replace(max_tokens=400)
        monkeypatch.setattr(llm._runner, "step", press)
        for call in (llm.generate, lambda *args: list(llm.stream(*args))):
            steps.clear()
            with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
                call(PROMPTS, long)
            assert len(steps) == 3
        monkeypatch.undo()
        assert tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        llm.require_no_leak()


def test_interrupted_exchange(folder, monkeypatch):
    """After a second Ctrl-C, a late answer is not taken for that of the next call."""
    with LLM(folder, **OPTIONS) as llm:

        def interrupt(connections):
            raise KeyboardInterrupt

        monkeypatch.setattr("absorbed_mla.serving.executor.multiprocess.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("text", use_tqdm=False)
        monkeypatch.undo()
        with pytest.raises(EngineDeadError):
            llm.generate("text", use_tqdm=False)


class TestErrors:
    """An error of a rank is that of the call, with its type."""

    def test_broken_checkpoint(self, tmp_path):
        """Its headers are fine."""
        config = tiny_config(num_hidden_layers=2, torch_dtype="float32")
        tensors = random_tensors(config, torch.float32)
        name = "model.layers.1.self_attn.o_proj.weight"
        tensors[name] = tensors[name][:-1].clone()
        broken = write_hugging_face(tmp_path / "model", config, tensors)
        with pytest.raises(CheckpointError, match="o_proj"):
            LLM(broken)

    def test_before_a_process_is_started(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr(subprocess, "Popen", None)
        with pytest.raises(ValueError, match="must divide the model's 4 attention heads, got 3"):
            LLM(folder, tensor_parallel_size=3)
        with pytest.raises(ValueError, match="model must be a folder with a checkpoint"):
            LLM(tmp_path / "nothing")
        with pytest.raises(ValueError, match="num_speculative_tokens 1 needs a checkpoint with"):
            LLM(folder, num_speculative_tokens=1)

    def test_a_tokenizer_that_is_none(self, folder, tmp_path):
        """It is opened while the processes load the model, which then end."""
        before = psutil.Process().children()
        with pytest.raises(ValueError, match="tokenizer"):
            LLM(folder, tokenizer=tmp_path / "nothing")
        assert psutil.Process().children() == before


class _TwoRanks(ProcessRunner):
    """Rank 0 reports an error at once; rank 1 does something else."""

    RANKS = (
        "c.send(('error', RuntimeError('connection closed by peer')))",
        "time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)",
    )

    # Ranks that have ended before anything is sent to them.
    ENDED: tuple[int, ...] = ()

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        setup = "import os, signal, sys, time; from multiprocessing.connection import Connection"
        code = f"{setup}; c = Connection(int(sys.argv[1])); {self.RANKS[rank]}"
        self._log(rank).touch()
        with theirs:
            command = [sys.executable, "-c", code, str(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
        self._connections.append(ours)
        if rank in self.ENDED:
            self._processes[rank].wait()


class TestConsequences:
    """Ranks whose peer is killed have errors, too, and report them before the kernel is done."""

    OPTIONS = LLMOptions(tensor_parallel_size=2)

    def test_the_killed_rank_is_named(self):
        with pytest.raises(EngineDeadError, match="the process of rank 1 has ended with code -9"):
            _TwoRanks(Path("folder"), self.OPTIONS)

    @pytest.mark.parametrize("ends_first", [False, True])
    def test_an_error_of_its_own(self, monkeypatch, ends_first):
        """The other rank waits for ever, and is ended. An error is there after its rank's end."""
        monkeypatch.setattr(_TwoRanks, "RANKS", (_TwoRanks.RANKS[0], "time.sleep(1000)"))
        monkeypatch.setattr(_TwoRanks, "ENDED", (0,) if ends_first else ())
        with pytest.raises(RuntimeError, match="connection closed by peer") as found:
            _TwoRanks(Path("folder"), self.OPTIONS)
        assert type(found.value) is RuntimeError

    def test_the_cause_of_an_end(self, monkeypatch):
        """Wrong options are what they are also where another rank, seen first, fell over them."""
        refuses = "c.send(('error', ValueError('cache_tokens must be')))"
        monkeypatch.setattr(_TwoRanks, "RANKS", ("os._exit(3)", refuses))
        monkeypatch.setattr(_TwoRanks, "ENDED", (0, 1))
        with pytest.raises(ValueError, match="cache_tokens must be"):
            _TwoRanks(Path("folder"), self.OPTIONS)

    def test_an_error_while_nothing_runs(self, monkeypatch):
        """``check`` sees the end of a process first; then comes what it has written."""
        loads = "c.recv_bytes(); c.send(('done', None))"
        fails = f"{loads}; c.send(('done', 1)); c.send(('error', OSError('disk')))"
        monkeypatch.setattr(_TwoRanks, "RANKS", (fails, f"{loads}; time.sleep(1000)"))
        runner = _TwoRanks(Path("folder"), self.OPTIONS)
        runner._processes[0].wait()
        with pytest.raises(OSError, match="disk"):
            runner.check()
        with pytest.raises(EngineDeadError, match="have ended"):
            runner.check()


def test_errors_that_do_not_survive_a_pipe():
    class Local(Exception):
        pass

    assert isinstance(picklable(ValueError("text")), ValueError)
    found = picklable(Local("text"))
    assert type(found) is RuntimeError and str(found) == "Local: text"
