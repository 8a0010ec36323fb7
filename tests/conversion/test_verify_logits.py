"""Comparing predictions: the numbers, the text they are for, and the process that computes them."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from checkpoint_conversion import logit_comparison
from checkpoint_conversion.convert import convert
from checkpoint_conversion.logit_comparison import (
    TEXT,
    Source,
    compare_in_subprocess,
    compare_logits,
    sample_tokens,
)
from checkpoint_conversion.verify import verify
from tests.conversion.models import Architecture, make_model, save
from tests.conversion.support import refused


class TestNumbers:
    def test_equal(self):
        logits = torch.randn(2, 50, 11)
        result = compare_logits(logits, logits)
        assert result.max_abs == result.max_rel == result.kl_mean == result.kl_max == 0
        assert result.same_choice == 1 and result.tokens == 100

    def test_errors(self):
        a = torch.randn(1, 40, 11)
        b = a.clone()
        b[0, 37, 3] += 9
        result = compare_logits(a, b)
        assert result.max_abs == pytest.approx(9)
        assert result.max_rel == pytest.approx(9 / float(a.abs().max()))
        assert result.same_choice == 39 / 40

    def test_divergence(self):
        """Of known probabilities; a constant added to all logits changes none."""
        p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
        a, b = p.log().repeat(1, 70, 1), q.log().repeat(1, 70, 1) + 3
        expected = 0.5 * math.log(2) - 0.25 * math.log(2)
        result = compare_logits(a, b)
        assert result.kl_mean == pytest.approx(expected)
        assert result.kl_max == pytest.approx(expected)


@pytest.fixture
def tokenizer(tmp_path) -> dict[str, Path]:
    """One that knows two words of the text."""
    words = {"[UNK]": 0, "attention": 1, "latent": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return {"tokenizer.json": tmp_path / "tokenizer.json"}


class TestTokens:
    def test_tokenizer_of_the_checkpoint(self, tokenizer):
        tokens, origin = sample_tokens(tokenizer, 3, 1000)
        assert set(tokens) == {0, 1, 2}
        assert "tokenizer.json" in origin and str(len(tokens)) in origin

    def test_bytes(self):
        tokens, origin = sample_tokens({}, 256, 10_000)
        assert bytes(tokens).decode() == TEXT
        assert "bytes" in origin and "no tokenizer.json" in origin
        assert max(sample_tokens({}, 40, 10_000)[0]) < 40

    def test_most(self, tokenizer):
        assert len(sample_tokens(tokenizer, 3, 7)[0]) == 7

    def test_text_of_the_user(self, tokenizer, tmp_path):
        text = tmp_path / "mine.txt"
        text.write_text("latent attention latent")
        tokens, origin = sample_tokens(tokenizer, 3, 100, text)
        assert tokens == [2, 1, 2]
        assert "mine.txt" in origin

    def test_vocabulary_too_small(self, tokenizer):
        with refused("tokenizer.json", "largest 2", "vocabulary has 2"):
            sample_tokens(tokenizer, 2, 100)

    @pytest.mark.parametrize(("content", "part"), [(b"\xff\xfe", "no UTF-8"), (b" \n", "empty")])
    def test_no_text(self, tmp_path, content, part):
        (tmp_path / "text").write_bytes(content)
        with refused("--text", part):
            sample_tokens({}, 256, 10, tmp_path / "text")

    def test_damaged_tokenizer(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{")
        with refused("tokenizer.json is no tokenizer"):
            sample_tokens({"tokenizer.json": tmp_path / "tokenizer.json"}, 256, 10)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A model of transformers, and the same one converted."""
    folder = tmp_path_factory.mktemp("model")
    save(make_model(Architecture("v3", q_lora=True, moe=True, rope="yarn")), folder / "hf")
    convert(folder / "hf", folder / "absorbed", "absorbed")
    return folder / "hf", folder / "absorbed"


@pytest.mark.usefixtures("forked_python")
class TestVerify:
    def test_both_libraries(self, folders):
        report = verify(*folders, logits=True)
        assert report.equal and report.accepted
        logits = report.logits
        # More than the original context.
        assert logits.tokens == 128
        assert 0 < logits.max_rel < 1e-4
        assert 0 <= logits.kl_mean <= logits.kl_max < 1e-6
        assert logits.evaluated_by[0].startswith("transformers")
        assert logits.evaluated_by[1].endswith("absorbed MLA")
        assert "KL divergence" in "\n".join(report.lines())

    def test_tolerance_of_logits(self, folders, monkeypatch):
        result = compare_logits(torch.ones(1, 2, 3), torch.full((1, 2, 3), 1.01))
        monkeypatch.setattr("checkpoint_conversion.verify.compare_in_subprocess", lambda *_: result)
        report = verify(*folders)
        assert report.equal and not report.accepted
        assert "logits differ" in "\n".join(report.lines())
        assert verify(*folders, logits_tolerance=0.1).accepted

    @pytest.mark.parametrize("reason", ["memory", "package"])
    def test_impossible(self, folders, monkeypatch, reason):
        """Asked for, it is an error; otherwise the report says why."""
        if reason == "memory":
            monkeypatch.setattr(logit_comparison, "_available_memory", lambda: 1000)
            part = "half of the available memory is 500 B"
        else:
            monkeypatch.setitem(logit_comparison._NEEDED, "absorbed", ("no.such.package",))
            part = "B (absorbed) needs no.such.package, which is not installed"
        with refused("logits", part):
            verify(*folders, logits=True)
        report = verify(*folders)
        assert report.logits is None and report.accepted
        assert any(part in note for note in report.notes)

    def test_not_wanted(self, folders):
        report = verify(*folders, logits=False)
        assert report.logits is None and report.notes == ()

    def test_process_that_fails(self, tmp_path):
        """What it said comes back."""
        with refused("could not be computed", str(tmp_path), "is empty"):
            compare_in_subprocess([Source(tmp_path)] * 2, [1, 2], "nothing")
