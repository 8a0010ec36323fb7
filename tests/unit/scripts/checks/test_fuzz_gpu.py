"""fuzz_gpu.py: every launched kernel has cases, and each family finds a fault in its results."""

from __future__ import annotations

import importlib
import json
import os
import time

import pytest
import torch
from torch import Tensor

from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.gluon_emulation import emulated
from tests.support.launched_kernels import launched_kernels
from tests.support.quick_interpreter import quicken

pytest.importorskip("triton.experimental.gluon")

from checks import fuzz_gpu
from checks.fuzz import runner
from checks.fuzz.case import CaseId, run_case
from checks.fuzz.compare import Comparison, Mismatch
from checks.fuzz.family import Family, all_families, named
from checks.fuzz.results import Results, page

FAMILIES = all_families()
CPU = torch.device("cpu")
TRITON = [name for name, family in FAMILIES.items() if not family.hopper]
# Before a test imports them as kernels for a GPU.
with triton_interpreter():
    for kernel in sorted({kernel for name in TRITON for kernel in FAMILIES[name].kernels}):
        importlib.import_module(f"absorbed_mla.{kernel.rpartition('.')[0]}")


def test_every_launched_kernel_has_cases():
    declared = {kernel for family in FAMILIES.values() for kernel in family.kernels}
    launched = launched_kernels()
    assert len(launched) > 60
    assert launched - declared == set(), "add them to a family of scripts/checks/fuzz/families"
    assert declared - launched == set()


class Faulty(Comparison):
    """Also compares each result with one row of it changed, which must be refused."""

    def rows(self, name, actual, expected, noise, dtype):
        super().rows(name, actual, expected, noise, dtype)
        self._refuses(super().rows, name, actual, expected, noise, dtype)

    def near(self, name, actual, expected, tolerance):
        super().near(name, actual, expected, tolerance)
        self._refuses(super().near, name, actual, expected, tolerance)

    def same(self, name, actual, expected):
        super().same(name, actual, expected)
        self._refuses(super().same, name, actual, expected)

    def _refuses(self, compare, name: str, actual: Tensor, *rest) -> None:
        if actual.numel():
            with pytest.raises(Mismatch):
                compare(name, spoiled(actual), *rest)


def spoiled(x: Tensor) -> Tensor:
    """With the last row, or the last number, changed by more than it is large."""
    x = x.clone(memory_format=torch.contiguous_format)
    last = x.view(-1, x.shape[-1])[-1] if x.dim() else x
    if x.is_floating_point():
        last.copy_(torch.where(last.isfinite(), 3 * last + 1, 0.0))
    else:
        last += 1
    return x


@pytest.fixture
def small(monkeypatch):
    """Thresholds of sizes that a GPU's cases reach."""
    with triton_interpreter():
        quicken()
        for module, name, value in (
            ("dsa.key_lists", "_LEAST_QUERIES", 5),
            ("dsa.splits", "_LEAST_KEYS", 8),
            ("dsa.splits", "_ROWS", 1),
            ("invariant.matrix_product", "PART", 64),
            ("invariant.grouped_product", "PART", 64),
        ):
            found = importlib.import_module(f"absorbed_mla.kernels.{module}")
            monkeypatch.setattr(found, name, value)
        yield


# Cases of a family, at most, until all of its kernels were launched; and at least.
MOST, LEAST = 30, 2


@needs.no_gpu
@pytest.mark.no_cover
@pytest.mark.parametrize("name", TRITON)
def test_cases_pass_and_faults_are_found(name, small):
    family, launched = FAMILIES[name], set()
    for number in range(MOST):
        outcome = run_case(family, CaseId(0, number, number % 2), CPU, Faulty, with_traceback=True)
        assert outcome.error is None, outcome.error
        launched |= set(outcome.launched)
        if number + 1 >= LEAST and launched >= set(family.kernels):
            break
    assert launched == set(family.kernels)


def other_tokens(right):
    return lambda *args, **more: (found := right(*args, **more)).where(
        torch.arange(len(found)) > 0, (found + 1) % 300
    )


def other_experts(right):
    """With their own scores, as where a bias of the choice is wrong."""

    def wrong(config, logits, bias, scale):
        other = torch.arange(logits.shape[-1]) * 0.1
        return right(config, logits, other if bias is None else bias + other, scale)

    return wrong


def missed_score(right):
    def wrong(q, k, lse, of_heads, *rest):
        right(q, k, lse, of_heads, *rest)
        of_heads -= 1

    return wrong


# Results that are not compared number by number: where they come from, and what a fault makes of
# that.
FAULTS = {
    "draw-tokens": ("absorbed_mla.kernels.sampling.draw.draw_tokens", other_tokens),
    "token-weights": (
        "absorbed_mla.testing.token_probabilities.kernel_weights",
        lambda right: lambda *args: (found := right(*args)) + found // 100,
    ),
    "choose-experts": ("checks.fuzz.families.experts._choose", other_experts),
    "largest-scores": ("absorbed_mla.kernels.max_logits.largest_scores", missed_score),
}


@needs.no_gpu
@pytest.mark.no_cover
@pytest.mark.parametrize("name", FAULTS)
def test_other_choices_are_found(name, small, monkeypatch):
    place, fault = FAULTS[name]
    module, _, function = place.rpartition(".")
    module = importlib.import_module(module)
    monkeypatch.setattr(module, function, fault(getattr(module, function)))
    outcomes = [run_case(FAMILIES[name], CaseId(0, i, 0), CPU) for i in range(6)]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    assert len(errors) >= 3
    assert all(error.startswith("Mismatch") for error in errors), errors


def test_parts_of_tokens():
    """Of ten equal tokens the sixth has the random numbers from 0.5 to 0.6; filters leave some."""
    from checks.fuzz.families.sampling import may_be_drawn

    def drawn(random: float, *filters: float, vocabulary: int = 10, least: int = 0) -> list[int]:
        numbers = torch.tensor([1.0, random, *filters, 1.0], dtype=torch.float64)
        tokens = torch.arange(least, least + 10)
        logits = torch.zeros(10, vocabulary)
        return tokens[may_be_drawn(logits, numbers[:, None].expand(6, 10), tokens)].tolist()

    assert drawn(0.55, 0.0, 10, 1.0) == [5]
    assert drawn(0.6, 0.0, 10, 1.0) == [5, 6]  # rounding may move the edge
    assert drawn(0.55, 0.0, 4, 1.0) == [2]
    assert drawn(0.55, 0.0, 10, 0.35) == [2]
    assert drawn(0.99, 1.0, 10, 1.0) == [9]
    # Half of 65,607 tokens are 32,804; with either rounding there are one more or one fewer.
    assert drawn(1.0, 0.0, 65607, 0.5, vocabulary=70000, least=32798) == [32802, 32803, 32804]


# Launchers and kernels for Hopper, which run in PyTorch here, by a family that is cheap there.
EMULATED = {
    "latent-hopper-pieces": ("forward", "attend_forward"),
    "expanded-hopper-forward": ("multi_head", "attend_multi_head"),
    "paged-hopper": ("decode", "attend_decode"),
    "sparse-target-hopper": ("sparse_target", "sum_sparse_probabilities"),
}


@needs.no_gpu
@pytest.mark.no_cover
@pytest.mark.parametrize("name", EMULATED)
def test_cases_of_kernels_for_hopper(name, small, monkeypatch):
    file, kernel = EMULATED[name]
    launcher = importlib.import_module(f"absorbed_mla.kernels.hopper.{file}")
    latent = importlib.import_module("checks.fuzz.families.latent")
    monkeypatch.setattr(latent, "LONG", (2500, 100))
    with emulated(launcher, kernel, f"{file}_kernel"):
        for number in range(2):
            outcome = run_case(FAMILIES[name], CaseId(0, number, 0), CPU, with_traceback=True)
            assert outcome.error is None, outcome.error


def test_noise_is_what_rounding_loses():
    """Of sums in bf16 and fp16 a part of the tolerance, and a tenth more than it is refused."""
    from checks.fuzz.references import product

    make = torch.Generator().manual_seed(0)
    left, right = (torch.randn(s, generator=make).bfloat16() for s in ((40, 700), (700, 90)))
    exact = product(left, right, torch.bfloat16)
    compare = Comparison()
    compare.rows("x", (left.float() @ right.float()).bfloat16(), *exact, torch.bfloat16)
    assert 0.02 < compare.worst < 0.5
    with pytest.raises(Mismatch, match=r"x\[3\] is off"):
        wrong = exact.value.clone()
        wrong[3] *= 1.05
        compare.rows("x", wrong, *exact, torch.bfloat16)
    for value in (torch.nan, torch.inf):
        with pytest.raises(Mismatch, match="infinite or NaN"):
            wrong[3, 4] = value
            compare.rows("x", wrong, *exact, torch.bfloat16)
    with pytest.raises(Mismatch, match="shape"):
        compare.same("x", wrong[1:], exact.value)


class TestProcesses:
    """Workers are forked here; in the script each is a new process."""

    @staticmethod
    def families() -> dict[str, Family]:
        def fine(_, draw, compare):
            compare.same("x", torch.ones(2), torch.ones(2))

        def dies(_, draw, compare):
            print("last words", flush=True)
            os._exit(3)

        def hangs(_, draw, compare):
            time.sleep(60)

        def wrong(_, draw, compare):
            compare.same("x", torch.ones(2), torch.zeros(2))

        runs = {"fine": fine, "dies": dies, "hangs": hangs, "wrong": wrong}
        return {name: Family(name, ("no.kernel",), run) for name, run in runs.items()}

    def test_processes_that_end_or_hang_are_failures(self, monkeypatch):
        families = self.families()
        monkeypatch.setattr(runner, "_START", "fork")
        monkeypatch.setattr(runner, "_MOST_SECONDS", 0.5)
        monkeypatch.setattr(runner, "all_families", lambda: families)
        monkeypatch.setattr(runner, "prepare_device", lambda share: CPU)
        results = Results(families, [], {})
        run = runner.Runner(0, 300.0, 2, results, lambda seconds: None)
        add = results.add

        def add_until_all(*outcome):
            add(*outcome)
            if all(found.cases for found in results.found.values()):
                run.deadline = 0.0

        monkeypatch.setattr(results, "add", add_until_all)
        run.run()
        errors = {failure["family"]: failure["error"] for failure in results.failures}
        assert set(errors) == {"dies", "hangs", "wrong"}
        assert "exit code 3: last words" in errors["dies"]
        assert "took more than" in errors["hangs"]
        assert errors["wrong"].startswith("Mismatch: x[0] must be equal: got [1.0]")
        assert results.found["fine"].failures == 0
        first = next(f for f in results.failures if f["family"] == "wrong")
        command = "python scripts/checks/fuzz_gpu.py --only wrong --case 0.0.0"
        assert first["command"] == command

    def test_report(self, tmp_path, capsys):
        """Failures, kernels that no case launched, and the page."""
        results = Results(self.families(), ["other"], self.about())
        outcome = run_case(self.families()["wrong"], CaseId(5, 1, 2), CPU)
        results.add("wrong", CaseId(5, 1, 2), outcome)
        file = tmp_path / "gpu-fuzz" / "a.json"
        file.parent.mkdir()
        file.write_text(json.dumps(results.report(12.3)))
        assert json.loads(file.read_text())["not launched"] == ["no.kernel"]
        assert fuzz_gpu.main(["--render", str(file)]) == 0
        text = capsys.readouterr().out
        assert text == f"{page(tmp_path)}\n"
        assert "1 cases in 12 s with seed 5 on a GPU (3 processes; torch 1; " in text
        assert "`python scripts/checks/fuzz_gpu.py --only wrong --case 5.1.2`: Mismatch" in text
        assert "| `wrong` | 1 | 1 | 1 | 0.00 |" in text

    @staticmethod
    def about() -> dict:
        about = {"device": "a GPU", "versions": {"torch": "1"}, "seed": 5, "jobs": 3}
        return {**about, "date": "today", "commit": "abc"}


@needs.no_gpu
def test_one_case_again(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = ["--only", "choice._choice_kernel", "--case", "0.1.2"]
    assert fuzz_gpu.main(command) == 0
    assert capsys.readouterr().out.startswith("choose-experts 0.1.2 Config(groups=")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--only", "nothing"], "--only must be families or kernels, got 'nothing'"),
        (["--only", "rope", "--case", "1.2"], "--case must be SEED.CONFIGURATION.NUMBER"),
        (["--only", "rope,merge", "--case", "1.2.3"], "--case needs --only with one family"),
        (["--seconds", "0"], "--seconds must be above 0, got 0.0"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--render", "nowhere.json"], "--render must be a file of --output"),
    ],
)
def test_mistakes(words, message, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fuzz_gpu.main(words) == 2
    assert message in capsys.readouterr().err


@needs.no_gpu
def test_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert fuzz_gpu.main([]) == 2
    assert "it needs a GPU" in capsys.readouterr().err


def test_names_of_kernels():
    """By the end of their names, at a dot."""
    assert list(named(FAMILIES, ["_choice_kernel"])) == ["choose-experts"]
    assert "sparse-cached-triton" in named(FAMILIES, ["forward._forward_kernel"])
    with pytest.raises(ValueError, match="got 'hoice_kernel'"):
        named(FAMILIES, ["hoice_kernel"])
