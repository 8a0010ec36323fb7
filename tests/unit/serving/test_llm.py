"""``LLM`` around a live model: outputs, stop strings, streams, requests that come and go."""

import asyncio
import time

import pytest
import torch
from megatron.core.inference.utils import InferenceMode

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer
from tests.support import world
from tests.support.engine import Request, by_whole_forwards, generating_model, prompt
from tests.support.models import VOCAB

PROMPTS = [prompt(length, seed) for seed, length in enumerate((5, 70, 33))]
GREEDY = SamplingParams(max_tokens=10, temperature=0)


class Letters(ByteTokenizer):
    """A letter for every token of the tiny models: A, B, C and so on."""

    vocab_size = VOCAB
    end_tokens = (VOCAB - 1,)

    def encode(self, text, *, begin=None):
        return [ord(letter) - ord("A") for letter in text]

    def stream(self, prompt, *, skip_special_tokens=True):
        return self

    def push(self, tokens):
        return "".join(chr(ord("A") + token) for token in tokens)

    def finish(self):
        return ""

    def token_text(self, token):
        return self.push([token])

    def chat(self, messages, **options):
        return self.encode("".join(message["content"] for message in messages))


LETTERS = Letters()


@pytest.fixture(scope="module")
def llm():
    """Awake all the time, so its model is not that of tests that train."""
    with LLM.from_model(
        generating_model(num_layers=1), tokenizer=LETTERS, max_model_len=256, max_num_seqs=8
    ) as made:
        made.wake()
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        while llm.has_unfinished_requests():
            llm.step()
        llm.require_no_leak()


@pytest.fixture(scope="module")
def expected(model):
    requests = [Request(tokens, 10) for tokens in PROMPTS]
    return [result.tokens for result in by_whole_forwards(model, requests)]


def token_ids(outputs) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


class TestGenerate:
    def test_token_ids_and_texts(self, llm, expected):
        outputs = llm.generate([*PROMPTS, LETTERS.push(PROMPTS[0])], GREEDY, use_tqdm=False)
        assert token_ids(outputs) == [*expected, expected[0]]
        first, last = outputs[0], outputs[-1]
        assert (first.prompt, last.prompt) == (None, LETTERS.push(PROMPTS[0]))
        assert first.prompt_token_ids == last.prompt_token_ids == PROMPTS[0]
        assert first.finished and first.outputs[0].finish_reason == "length"
        assert first.outputs[0].text == LETTERS.push(expected[0])

    def test_one_prompt(self, llm, expected):
        for one in (PROMPTS[0], LETTERS.push(PROMPTS[0]), [LETTERS.push(PROMPTS[0])]):
            assert token_ids(llm.generate(one, GREEDY, use_tqdm=False)) == expected[:1]

    def test_in_an_event_loop(self, llm, expected):
        """As in a notebook, whose cells run in one."""

        async def cell():
            return llm.generate(PROMPTS, GREEDY, use_tqdm=False)

        assert token_ids(asyncio.run(cell())) == expected

    def test_parameters_for_each(self, llm, expected):
        each = [GREEDY.replace(max_tokens=n) for n in (1, 2, 3)]
        outputs = llm.generate(PROMPTS, each, use_tqdm=False)
        assert token_ids(outputs) == [tokens[:n] for n, tokens in enumerate(expected, 1)]
        with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
            llm.generate(PROMPTS, each[:2])

    def test_chat(self, llm, expected):
        message = {"role": "user", "content": LETTERS.push(PROMPTS[0])}
        assert token_ids(llm.chat([message], GREEDY, use_tqdm=False)) == expected[:1]
        several = llm.chat([[message], [message]], GREEDY, use_tqdm=False)
        assert token_ids(several) == expected[:1] * 2

    def test_several_outputs(self, llm):
        """Each has a seed of its own, and they are the same whatever n is."""
        params = SamplingParams(max_tokens=8, seed=3, temperature=1.5)
        [three] = llm.generate(PROMPTS[0], params.replace(n=3), use_tqdm=False)
        [two] = llm.generate(PROMPTS[0], params.replace(n=2), use_tqdm=False)
        assert [one.index for one in three.outputs] == [0, 1, 2]
        assert token_ids([three])[:2] == token_ids([two])
        assert len(set(map(tuple, token_ids([three])))) == 3

    def test_logprobs(self, llm, model):
        params = GREEDY.replace(logprobs=2, max_tokens=3)
        [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
        [one] = output.outputs
        assert len(one.logprobs) == 3
        for token, place in zip(one.token_ids, one.logprobs):
            assert next(iter(place)) == token and len(place) == 2
            assert [entry.rank for entry in place.values()] == [1, 2]
            assert place[token].decoded_token == LETTERS.push([token])
        assert one.token_logprobs == [
            place[token].logprob for token, place in zip(one.token_ids, one.logprobs)
        ]
        assert one.cumulative_logprob == pytest.approx(sum(one.token_logprobs))
        [output] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        [one] = output.outputs
        assert (one.logprobs, one.cumulative_logprob, one.token_logprobs) == (None, None, None)

    def test_logprob_of_a_token_that_is_not_likely(self, llm):
        params = SamplingParams(max_tokens=20, temperature=20.0, logprobs=1, seed=0)
        [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
        [one] = output.outputs
        ranks = [one.logprobs[i][token].rank for i, token in enumerate(one.token_ids)]
        assert None in ranks and set(ranks) <= {1, None}

    @pytest.mark.parametrize(
        "extreme",
        [
            {"temperature": 1e-300},
            {"temperature": 1e300},
            {"top_k": 10**30},
            {"top_p": 1e-300},
            {"max_tokens": 10**30},
            {"stop_token_ids": [2**31 - 1]},
            {"repetition_penalty": 1e-3, "frequency_penalty": -2.0},
            {"repetition_penalty": 1e3, "presence_penalty": 2.0},
        ],
        ids=str,
    )
    def test_extreme_values(self, llm, extreme):
        """One client's must not end the engine of all."""
        params = SamplingParams(**{"max_tokens": 20, "seed": 1, "ignore_eos": True, **extreme})
        [tokens] = token_ids(llm.generate(PROMPTS[0], params, use_tqdm=False))
        assert len(tokens) >= 20 and all(0 <= token < VOCAB for token in tokens)
        if extreme == {"temperature": 1e-300}:
            assert tokens[:10] == token_ids(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))[0]

    def test_prompt_logprobs(self, model):
        """Those of all tokens, of which the prefix cache has a block already."""
        params = GREEDY.replace(prompt_logprobs=1, max_tokens=1)
        prompt = (PROMPTS[1] * 66)[:66]
        with LLM.from_model(model, max_model_len=256, prompt_logprobs=True) as llm:
            *_, output = llm.generate([prompt] * 4, [GREEDY] * 3 + [params], use_tqdm=False)
        assert len(output.prompt_logprobs) == 66 and output.prompt_logprobs[0] is None
        text = torch.tensor([prompt], device=world.device())
        was_active = InferenceMode.is_active()
        InferenceMode.unset_active()
        with torch.no_grad():
            logits = model(text, torch.arange(text.shape[1], device=text.device)[None], None)[0]
        if was_active:
            InferenceMode.set_active()
        for i, place in enumerate(output.prompt_logprobs[1:]):
            token = prompt[i + 1]
            assert place[token].logprob == pytest.approx(
                logits.log_softmax(-1)[i, token].item(), abs=5e-5
            )

    def test_bad_words(self, llm):
        """What would have been generated is not, but what only begins with it is."""
        [plain] = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
        text = plain.outputs[0].text
        word = text[3:5]
        params = GREEDY.replace(bad_words=[word, text[5] + "A" * 20])
        [output] = llm.generate([PROMPTS[2]], params, use_tqdm=False)
        found = output.outputs[0].text
        assert word not in found and found[: text.index(word) + 1] == text[: text.index(word) + 1]

    def test_allowed_tokens_of_some(self, llm):
        """Beside requests that may have any."""
        params = [GREEDY, GREEDY.replace(allowed_token_ids=[3, 7]), GREEDY]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert set(outputs[1].outputs[0].token_ids) <= {3, 7}
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for place in (0, 2):
            assert outputs[place].outputs[0].token_ids == plain[place].outputs[0].token_ids

    def test_cached_tokens(self, llm):
        """Of whole blocks of an earlier prompt."""
        tokens = prompt(150, 11)
        found = [llm.generate([tokens], GREEDY, use_tqdm=False)[0] for _ in range(2)]
        assert [one.num_cached_tokens for one in found] == [0, 128]

    @pytest.mark.parametrize(("length", "most", "left"), [(30, 7, 7), (400, -1, 246), (9, 30, 9)])
    def test_truncated_prompt(self, llm, length, most, left):
        """Its last tokens are read; -1: what leaves room for the answer."""
        tokens = prompt(length, 3)
        params = GREEDY.replace(truncate_prompt_tokens=most)
        [output], [short] = (
            llm.generate([one], asked, use_tqdm=False)
            for one, asked in ((tokens, params), (tokens[-left:], GREEDY))
        )
        assert output.prompt_token_ids == tokens[-left:]
        assert output.outputs[0].token_ids == short.outputs[0].token_ids

    @pytest.mark.parametrize(
        ("prompts", "params", "error"),
        [
            ([[1], []], GREEDY, "prompt 1: the prompt is empty"),
            ([[1], [VOCAB]], GREEDY, f"prompt 1: token {VOCAB} is not in the vocabulary"),
            ([[1] * 256], GREEDY, "prompt 0: the prompt has 256 tokens and must be shorter than"),
            ([[1]], GREEDY.replace(prompt_logprobs=1), "prompt_logprobs needs an engine with"),
            ([[1]], GREEDY.replace(logprobs=VOCAB + 1), f"at most the vocabulary's {VOCAB}, got"),
            *(
                ([[1], [1]], GREEDY.replace(**{name: value}), f"prompt 0: {name} must have {words}")
                for name, value, words in (
                    ("logit_bias", {1: 1, VOCAB: 1}, f"tokens below {VOCAB}, got {VOCAB}"),
                    ("allowed_token_ids", [VOCAB], f"tokens below {VOCAB}, got {VOCAB}"),
                    ("bad_words", [[1, VOCAB + 3]], f"tokens below {VOCAB}, got {VOCAB + 3}"),
                )
            ),
            # The model's end token is the last one.
            (
                [[1]],
                GREEDY.replace(
                    allowed_token_ids=[3, 5, VOCAB - 1], bad_words=[[3], [1, 5]], min_tokens=2
                ),
                "allowed_token_ids must have one that bad_words and min_tokens leave",
            ),
        ],
    )
    def test_refused_before_anything_runs(self, llm, prompts, params, error):
        with pytest.raises(ValueError, match=error):
            llm.generate(prompts, params)
        assert not llm.has_unfinished_requests()

    def test_without_a_tokenizer(self, model):
        with LLM.from_model(model, max_model_len=256) as llm:
            [output] = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
            assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 10
            with pytest.raises(ValueError, match="came without a tokenizer: give prompts as token"):
                llm.generate("text")
            with pytest.raises(ValueError, match="stop needs a tokenizer"):
                llm.generate([1], SamplingParams(stop="x"))
            with pytest.raises(ValueError, match="prompt 0: bad_words needs a tokenizer"):
                llm.generate([1], SamplingParams(bad_words=["x"]))


class TestStop:
    """The whole text is known, all letters differ, and the request ends where it must."""

    BASE = GREEDY.replace(presence_penalty=2.0, repetition_penalty=3.0)

    @pytest.fixture(scope="class")
    def text(self, llm):
        text = self.run(llm).text
        assert len(set(text)) == len(text) == 10
        return text

    def run(self, llm, **params):
        [output] = llm.generate([PROMPTS[0]], self.BASE.replace(**params), use_tqdm=False)
        return output.outputs[0]

    @pytest.mark.parametrize(
        ("others", "place", "shown", "included"),
        [
            ((), (3, 6), 3, False),
            ((), (3, 6), 6, True),
            ((5,), (4, 6), 4, False),
            ((), (8, 10), 8, False),
        ],
        ids=["string", "in the output", "first of two", "at the end"],
    )
    def test_string(self, llm, text, others, place, shown, included):
        """Also one that begins in one token and ends in another."""
        stop, params = text[slice(*place)], {"include_stop_str_in_output": included}
        one = self.run(llm, stop=["no such", *(text[i] for i in others), stop], **params)
        assert (one.text, one.finish_reason, one.stop_reason) == (text[:shown], "stop", stop)
        assert one.token_ids == LETTERS.encode(text[: place[1]])

    def test_token(self, llm, text):
        tokens = LETTERS.encode(text)
        one = self.run(llm, stop_token_ids=[tokens[4]])
        assert (one.text, one.finish_reason, one.stop_reason) == (text[:4], "stop", tokens[4])
        assert one.token_ids == tokens[:5]

    def test_the_models_end_token(self, llm, text, monkeypatch):
        monkeypatch.setattr(llm.prompt_encoder, "end_tokens", tuple(LETTERS.encode(text[4])))
        one = self.run(llm)
        assert (one.text, one.finish_reason, one.stop_reason) == (text[:4], "stop", None)
        assert self.run(llm, ignore_eos=True).text == text
        assert len(self.run(llm, min_tokens=7).token_ids) > 7

    def test_nothing_is_shown_that_may_be_taken_back(self, llm, text):
        shown = []
        params = self.BASE.replace(stop=text[4:7] + "!")
        for output in llm.stream([PROMPTS[0]], params):
            shown.append(output.outputs[0].text)
        assert shown[-1] == text
        # The beginning of the stop string is there after tokens 5, 6 and 7.
        assert [len(one) for one in shown] == [1, 2, 3, 4, 4, 4, 4, 8, 9, 10]


class TestStream:
    def test_grows(self, llm, expected):
        seen = [[] for _ in PROMPTS]
        for output in llm.stream(PROMPTS, GREEDY):
            index = PROMPTS.index(output.prompt_token_ids)
            seen[index].append(len(output.outputs[0].token_ids))
        assert seen == [list(range(1, 11))] * 3

    def test_leaving_early_aborts(self, llm, expected):
        stream = llm.stream(PROMPTS, GREEDY.replace(max_tokens=100))
        next(stream)
        stream.close()
        assert llm.has_unfinished_requests(), "the engine has to end them"
        while llm.has_unfinished_requests():
            assert not llm.step(), "nobody waits for them"
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected

    def test_two_at_once(self, llm, expected):
        """What one of them does not wait for is kept for the other."""
        first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1:], GREEDY)
        a, b = next(first), next(second)
        *_, a = first
        found = {output.request_id: output for output in (b, *second)}
        assert [token_ids([a])[0], *token_ids(found.values())] == expected


class TestStepByStep:
    def test_add_while_others_run(self, llm, expected):
        names = [llm.add_request(PROMPTS[0], GREEDY)]
        ended = {}
        for step in range(100):
            if step in (3, 5):
                names.append(llm.add_request(PROMPTS[len(names)], GREEDY, f"own-{step}"))
            for output in llm.step():
                if output.finished:
                    ended[output.request_id] = output
            if not llm.has_unfinished_requests():
                break
        assert names[1:] == ["own-3", "own-5"]
        assert token_ids(ended[name] for name in names) == expected

    def test_abort(self, llm, expected):
        name = llm.add_request(PROMPTS[0], GREEDY.replace(n=2))
        other = llm.add_request(PROMPTS[1], GREEDY)
        for _ in range(4):
            llm.step()
        llm.abort(name)
        llm.abort("no such request")
        ended = {}
        while llm.has_unfinished_requests():
            ended.update({one.request_id: one for one in llm.step() if one.finished})
        assert token_ids([ended[name]]) == [expected[0][:4]] * 2
        assert [one.finish_reason for one in ended[name].outputs] == ["abort", "abort"]
        assert token_ids([ended[other]]) == expected[1:2]
        llm.abort(name)

    def test_an_id_of_a_request_that_runs(self, llm):
        llm.add_request(PROMPTS[0], GREEDY, "same")
        with pytest.raises(ValueError, match="'same' is that of a request that runs"):
            llm.add_request(PROMPTS[0], GREEDY, "same")


class TestSleep:
    @pytest.fixture
    def own(self, model):
        with LLM.from_model(model, max_model_len=256) as made:
            yield made

    def test_asleep_from_the_beginning(self, own, model, expected):
        """Every call wakes it, and leaves the model ready to be trained."""
        with pytest.raises(RuntimeError, match=r"asleep; call wake\(\)"):
            own.add_request([1])
        for _ in range(2):
            assert token_ids(own.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
            assert model.training
            for call in (own.step, own.statistics, own.require_no_leak):
                with pytest.raises(RuntimeError, match="asleep"):
                    call()

    @pytest.mark.parametrize("level", [1, 0])
    def test_between_updates(self, own, model, expected, level):
        """The weights are those of the moment, and nothing cached is older."""
        own.wake()
        assert not model.training
        shared = PROMPTS[1]
        own.generate([shared], GREEDY, use_tqdm=False)
        own.sleep(level)
        assert model.training
        weights = [weight.data for weight in model.parameters()]
        saved = [weight.clone() for weight in weights]
        try:
            for weight in weights:
                weight.mul_(1.5)
            [now] = by_whole_forwards(model, [Request(shared, 10)])
            assert now.tokens != expected[1]
            own.wake()
            assert token_ids(own.generate([shared], GREEDY, use_tqdm=False)) == [now.tokens]
        finally:
            own.sleep()
            for weight, before in zip(weights, saved):
                weight.copy_(before)

    def test_sleep_aborts(self, own):
        own.wake()
        own.add_request(PROMPTS[0], GREEDY)
        own.step()
        own.sleep()
        assert not own.has_unfinished_requests()
        own.wake()
        assert own.statistics().steps == 0

    def test_prefix_cache_across_calls(self, own, expected):
        own.wake()
        for found in (0, 1):
            outputs = own.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
            assert token_ids(outputs) == expected[1:2]
            assert own.statistics().prefix_blocks == found


def test_starts_of_requests_and_prefix_queries():
    """A prompt in chunks begins with the first, another when there is room; known at once."""
    options = {"max_model_len": 256, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    long, short = prompt(150, seed=3), prompt(20, seed=4)
    with LLM.from_model(generating_model(num_layers=1), tokenizer=LETTERS, **options) as own:
        own.wake()
        names = [own.add_request(text, GREEDY) for text in (long, short)]
        begins, ends, seen = [], {}, {}
        while own.has_unfinished_requests():
            begins.append(time.time())
            for output in own.step():
                name = output.request_id
                seen.setdefault(name, (output.first_scheduled_time, output.num_cached_tokens))
                ends[name] = time.time()
        assert own.statistics().chunks
        (first, _), (second, _) = (seen[name] for name in names)
        assert begins[0] <= first <= begins[1] and second >= begins[-10]
        assert ends[names[0]] <= ends[names[1]] and second > ends[names[0]] - 1e-3
        assert (own.statistics().prefix_queries, own.statistics().prefix_hits) == (170, 0)
        # The stop string ends it here, before the engine has a result.
        params = SamplingParams(max_tokens=10, temperature=0, stop=[chr(65 + n) for n in range(60)])
        [output] = own.generate([long], params, use_tqdm=False)
        assert output.num_cached_tokens == 128 and output.first_scheduled_time > second
        assert (own.statistics().prefix_queries, own.statistics().prefix_hits) == (320, 128)


def test_prompt_longer_than_the_device_cache():
    """Of 192 tokens, three blocks of which are in host memory."""
    with LLM.from_model(
        generating_model(num_layers=1),
        max_model_len=400,
        max_num_seqs=1,
        max_num_batched_tokens=63,
        cache_tokens=192,
        host_cache_tokens=256,
    ) as own:
        text = prompt(350, seed=8)
        [output] = own.generate([text], GREEDY, use_tqdm=False)
        [expected] = by_whole_forwards(own._runner._model, [Request(text, 10)])
        assert output.outputs[0].token_ids == expected.tokens


def test_prefixes_outlive_the_cache(tmp_path):
    """``sleep`` frees the cache, and the next call finds its blocks in the folder."""
    options = {"max_model_len": 256, "prefix_cache_dir": str(tmp_path), "prefix_cache_bytes": 10**6}
    with LLM.from_model(generating_model(num_layers=1), **options) as own:
        found = []
        for _ in range(2):
            own.wake()
            outputs = own.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
            found.append((token_ids(outputs), own.statistics().disk_blocks))
            own.sleep()
    assert found[0][0] == found[1][0]
    assert [blocks for _, blocks in found] == [0, 1]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"prefix_cache_dir": "x", "enable_prefix_caching": False},
            "prefix_cache_dir needs enable_prefix_caching=True, got False",
        ),
        (
            {"host_cache_tokens": 640, "cuda_graphs": True},
            "host_cache_tokens needs cuda_graphs=False, got True",
        ),
        ({"prefix_cache_bytes": 0}, "prefix_cache_bytes must be an integer of at least 1, got 0"),
        ({"dtype": "bfloat16", "form": "auto"}, "from_model has no option dtype, form"),
        ({"experts": "grouped"}, "from_model has no option experts: the model has it already"),
        ({"cuda_graphs": True}, "cuda_graphs needs a model that was built for them"),
        (
            {"num_speculative_tokens": 1},
            "num_speculative_tokens 1 needs a model with a multi-token",
        ),
        ({"max_num_seq": 3}, "LLM has no option max_num_seq; it has max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"cache_tokens": 5}, "cache_tokens must be an integer of at least 64, or None, got 5"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be above 0"),
        ({"tokenizer": "nowhere"}, "tokenizer must be a folder or 'bytes', got 'nowhere'"),
    ],
)
def test_refused_options(model, options, error):
    with pytest.raises(ValueError, match=error):
        LLM.from_model(model, **options)


def test_a_model_that_caches_nothing():
    model = generating_model(cache_mla_latents=False)
    with pytest.raises(ValueError, match="config must have cache_mla_latents=True"):
        LLM.from_model(model)
