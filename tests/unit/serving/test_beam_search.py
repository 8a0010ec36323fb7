"""``LLM.beam_search`` finds what transformers' beam search finds, in float32."""

import pytest
import torch

from absorbed_mla import LLM, BeamSearchParams, SamplingParams
from tests.conversion.models import VOCABULARY, Architecture, make_model, save
from tests.support import needs
from tests.support.forked_python import forks_python
from tests.support.llm import FAILING_PROMPT, FakeRunner, fake_llm

transformers = pytest.importorskip("transformers")

# Longer than a block of the cache, and shorter.
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (70, 7)
]
NEW = 8


@needs.no_gpu
@pytest.mark.usefixtures("forked_python")
class TestAsTransformers:
    @pytest.fixture(scope="class")
    def models(self, tmp_path_factory):
        """Both, with logits far enough from each other that no scores are equal."""
        model = make_model(Architecture("v3", True, True, "rope"))
        model.generation_config.eos_token_id = None
        with torch.no_grad():
            model.lm_head.weight.mul_(4)
        folder = save(model, tmp_path_factory.mktemp("beams"))
        sizes = {"max_model_len": 128, "max_num_seqs": 16, "dtype": "float32"}
        with forks_python(), LLM(folder, tokenizer="bytes", **sizes) as llm:
            yield model, llm

    @pytest.mark.parametrize(
        ("num_ends", "penalty"), [(0, 1.0), (1, 0.0), (2, -2.0), (2, 1.0), (40, 3.0)]
    )
    def test_sequences(self, models, monkeypatch, penalty, num_ends):
        """Texts that all go on to the end, or of which some or most end before."""
        model, llm = models
        ends = tuple(range(num_ends)) if num_ends > 2 else self._likely(llm)[:num_ends]
        monkeypatch.setattr(llm.prompt_encoder, "end_tokens", ends)
        params = BeamSearchParams(beam_width=4, max_tokens=NEW, length_penalty=penalty)
        lengths = set()
        for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
            found = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_beams=4,
                num_return_sequences=4,
                length_penalty=penalty,
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=list(ends) or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            assert len(output.sequences) == 4
            for ours, theirs, score in zip(
                output.sequences, found.sequences.tolist(), found.sequences_scores.tolist()
            ):
                length = len(ours.tokens) - len(prompt)
                assert ours.tokens == theirs[: len(ours.tokens)]
                assert set(theirs[len(ours.tokens) :]) <= set(ends[:1]), "padding"
                assert len(ours.logprobs) == length
                assert ours.cum_logprob / length**penalty == pytest.approx(score, rel=1e-4)
                ended = ours.tokens[-1] in ends
                assert ours.finish_reason == ("stop" if ended else "length")
                lengths.add(length)
        if not num_ends or penalty <= 0:
            assert (lengths == {NEW}) == (not num_ends)

    def test_ignoring_the_end(self, models, monkeypatch):
        _, llm = models
        params = BeamSearchParams(beam_width=2, max_tokens=NEW)
        monkeypatch.setattr(llm.prompt_encoder, "end_tokens", ())
        whole = self._tokens(llm, params)
        monkeypatch.setattr(llm.prompt_encoder, "end_tokens", self._likely(llm))
        assert self._tokens(llm, params) != whole
        params = BeamSearchParams(beam_width=2, max_tokens=NEW, ignore_eos=True)
        assert self._tokens(llm, params) == whole

    def test_the_prefix_cache(self, models):
        """Texts that begin with a block that is cached do not compute it again."""
        _, llm = models
        before = llm.statistics().prefix_blocks
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=4, max_tokens=NEW))
        assert llm.statistics().prefix_blocks - before >= 4 * (NEW - 1)
        llm.require_no_leak()

    def _tokens(self, llm, params) -> list[list[int]]:
        return [one.tokens for one in llm.beam_search(PROMPTS[0], params)[0].sequences]

    def _likely(self, llm) -> tuple[int, ...]:
        """Tokens in the middle of what is found without them."""
        params = BeamSearchParams(beam_width=4, max_tokens=NEW, ignore_eos=True)
        texts = [output.sequences[0].tokens for output in llm.beam_search(PROMPTS, params)]
        return tuple(dict.fromkeys(text[-NEW + 4] for text in texts))


class TestWithoutAModel:
    def test_texts(self):
        """Of all tokens; the first token's runner-up is the other beam's."""
        params = BeamSearchParams(beam_width=2, max_tokens=1, ignore_eos=True)
        [output] = fake_llm().beam_search({"prompt": "abc"}, params)
        assert [one.text for one in output.sequences] == ["abcc", "abcd"]
        assert fake_llm().beam_search([], params) == []

    def test_the_end_of_the_context(self):
        params = BeamSearchParams(beam_width=1, max_tokens=100)
        [output] = fake_llm().beam_search("a" * 509, params)
        assert output.sequences[0].text == "a" * 512

    def test_no_better_text_can_come(self):
        llm = fake_llm()
        llm.prompt_encoder.end_tokens = (ord("c"),)
        [output] = llm.beam_search("abc", BeamSearchParams(beam_width=1, max_tokens=9))
        assert output.sequences[0].text == "abcc" and llm._runner.num_steps == 1

    def test_a_live_model(self, monkeypatch):
        """Sleeps afterwards, and not before: that would empty the prefix cache."""
        runner, calls = FakeRunner(), []
        llm = fake_llm(runner)
        llm.sleep()
        monkeypatch.setattr(runner, "wake", lambda: calls.append("wake"))
        monkeypatch.setattr(runner, "sleep", lambda level: calls.append(level))
        llm.beam_search("abc", BeamSearchParams(beam_width=1, max_tokens=3))
        assert calls == ["wake", False] and runner.num_steps == 3

    def test_failures(self):
        llm, params = fake_llm(), BeamSearchParams(beam_width=1, max_tokens=3)
        with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
            llm.beam_search(["a", ""], params)
        llm._runner.tokens_before_failure = 0
        with pytest.raises(RuntimeError, match="a request of the beam search has ended: the model"):
            llm.beam_search(FAILING_PROMPT, params)
        assert not llm._runner.has_running()
        for refused in ({"beam_width": 0}, {"beam_width": 2, "temperature": -1.0}):
            with pytest.raises(ValueError, match=f"{[*refused][-1]} must be"):
                BeamSearchParams(max_tokens=3, **refused)

    def test_temperature(self):
        """A drawn token is one more candidate; the likeliest ones stay."""
        params = BeamSearchParams(beam_width=3, max_tokens=2, temperature=2.0)
        assert params.of_requests(2, 100) == SamplingParams(
            max_tokens=1, temperature=2.0, logprobs=5, ignore_eos=True
        )
        assert params.of_requests(2, 4).logprobs == 4
