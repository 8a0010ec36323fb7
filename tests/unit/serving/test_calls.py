"""Calls of ``LLM`` from several threads, that Ctrl-C ends, and with vLLM's conversations.

If these fail, threads get tokens of each other's requests, or one Ctrl-C costs the loaded model.
"""

import contextlib
import itertools
import signal
import sys
import threading

import numpy as np
import pytest
import torch
from tqdm import tqdm

from absorbed_mla import BeamSearchParams, SamplingParams
from absorbed_mla.serving.llm_engine import FairLock, interrupts_deferred
from absorbed_mla.serving.tokenizers.tokenizers import HuggingFaceTokenizer
from tests.support.llm import (
    FAILING_PROMPT,
    FAILURE,
    ChatBytes,
    FakeRunner,
    ctrl_c_interrupts,
    expected_text,
    fake_llm,
    until,
)
from tests.support.tokenizers import byte_level

PARAMS = SamplingParams(max_tokens=8)


def text_of(outputs) -> str:
    return outputs[0].outputs[0].text


class _OneAtATime(FakeRunner):
    """Notices calls that come while another one runs; each step takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.step_seconds = 0.002
        self.busy = False
        self.batches: list[int] = []

    def step(self, commands):
        assert not self.busy
        self.busy = True
        found = super().step(commands)
        self.batches.append(len(found))
        self.busy = False
        return found


def test_tokens_of_bad_words_are_found_once():
    """For all prompts of a call, and not by the thread that runs steps."""
    texts = []

    class Tokenizer(ChatBytes):
        def encode(self, text, **options):
            texts.append(text)
            return super().encode(text, **options)

    llm, params = fake_llm(tokenizer=Tokenizer()), SamplingParams(n=3, bad_words=["word"])
    encoded = [llm.prompt_encoder.encode(prompt, params) for prompt in ("a", "b")]
    assert texts == ["a", "word", " word", "b"]
    for prompt in encoded:
        llm.add_request(prompt, params)
    assert len(texts) == 4
    assert llm.prompt_encoder.encode("a", PARAMS).of_engine.bad_words == []


def test_prompts_of_another_encoder():
    """Another model's limits say nothing about this one's steps."""
    llm, other = fake_llm(tokenizer=ChatBytes()), fake_llm(tokenizer=ChatBytes())
    with pytest.raises(ValueError, match="by this LLM's prompt_encoder"):
        llm.add_request(other.prompt_encoder.encode("a", PARAMS), PARAMS)


class TestThreads:
    @pytest.mark.parametrize("awake", [True, False])
    def test_requests_run_together(self, awake):
        """Also around a live model, which the last call that has ended puts to sleep."""
        runner = _OneAtATime()
        llm, found = fake_llm(runner), {}
        if not awake:
            llm.sleep()
        begin = threading.Barrier(3)

        def run(prompt: str, tokens: int) -> None:
            begin.wait()
            params = SamplingParams(max_tokens=tokens)
            found[prompt] = text_of(llm.generate(prompt, params, use_tqdm=False))

        prompts = {"hello": 200, "other text": 60, "x": 20}
        threads = [threading.Thread(target=run, args=item) for item in prompts.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == {
            prompt: expected_text(prompt, tokens=count) for prompt, count in prompts.items()
        }
        assert max(runner.batches) == 3 and len(runner.batches) < sum(prompts.values())
        assert llm._awake is awake

    def test_everybody_gets_a_turn(self):
        """A thread that takes the lock again at once does not keep it from one that waits."""
        lock, order = FairLock(), []

        def take(name: str) -> None:
            with lock, lock:
                order.append(name)

        with lock:
            other = threading.Thread(target=take, args=("other",))
            other.start()
            until(lambda: lock._waiting.locked())
        take("again")
        other.join(10)
        assert order == ["other", "again"]


class _FewSteps(FakeRunner):
    """Fails instead of running empty steps without end."""

    def step(self, commands):
        assert self.num_steps < 100
        return super().step(commands)


class TestOwners:
    """Whoever runs a step, its outputs are for those who have asked for them."""

    @pytest.fixture
    def llm(self):
        return fake_llm(_FewSteps())

    def test_steps_beside_a_call(self, llm):
        stream = llm.stream("hello", SamplingParams(max_tokens=20))
        next(stream)
        assert not llm.has_unfinished_requests(), "the call runs its own"
        name = llm.add_request("abc", SamplingParams(max_tokens=30))
        found = []
        while llm.has_unfinished_requests():
            found += llm.step()
        assert {one.request_id for one in found} == {name} and len(found) == 30
        assert text_of(found[-1:]) == expected_text("abc", tokens=30)
        *_, last = stream
        assert last.finished and text_of([last]) == expected_text("hello", tokens=20)

    def test_calls_that_end_early(self, llm):
        stream = llm.stream("hello")
        next(stream)
        llm.add_request("abc", SamplingParams(max_tokens=3), "own")
        stream.close()
        assert [one.request_id for _ in range(3) for one in llm.step()] == ["own"] * 3
        assert not llm.has_unfinished_requests() and llm._runner.aborted == [0]

    @pytest.mark.parametrize("wakes", [True, False])
    def test_sleep_aborts_calls(self, llm, wakes):
        stream = llm.stream("hello", SamplingParams(max_tokens=20))
        next(stream)
        llm.add_request("abc")
        llm.sleep()
        if wakes:
            llm.wake()
        [last] = stream
        assert last.finished and last.outputs[0].finish_reason == "abort"
        assert llm._awake is wakes and not llm.has_unfinished_requests()

    def test_wake_in_the_middle_of_a_call(self, llm):
        """Which woke the model itself, and would put it to sleep."""
        llm.sleep()
        for wakes in (False, True):
            stream = llm.stream("hello")
            next(stream)
            if wakes:
                llm.wake()
            stream.close()
            assert llm._awake is wakes

    def test_ids_like_those_that_are_made(self, llm):
        llm.add_request("abc", PARAMS, "0")
        stream = llm.stream("x", SamplingParams(max_tokens=1))
        call = next(stream)
        assert call.request_id == "1"
        with pytest.raises(ValueError, match="'1' is that of a request that runs"):
            llm.add_request("abc", PARAMS, "1")


class TestCtrlC:
    """Pressed in the middle of a step, it comes after the step."""

    @pytest.fixture(autouse=True)
    def ctrl_c(self):
        with ctrl_c_interrupts():
            yield

    @pytest.fixture
    def pressed(self, monkeypatch):
        """An ``LLM``, and the numbers of steps in which Ctrl-C is pressed."""
        runner, when = FakeRunner(), set()
        step = runner.step

        def press(commands):
            if runner.num_steps in when:
                when.discard(runner.num_steps)
                signal.raise_signal(signal.SIGINT)
            return step(commands)

        monkeypatch.setattr(runner, "step", press)
        return fake_llm(runner), runner, when

    def test_whole_calls(self, pressed):
        llm, runner, when = pressed
        calls = (
            lambda text, params: llm.generate(text, params, False),
            lambda text, params: list(llm.stream(text, params)),
            lambda text, params: llm.chat([{"role": "user", "content": text}], params, False),
            lambda text, _: llm.beam_search(text, BeamSearchParams(beam_width=1, max_tokens=100)),
        )
        for call in calls:
            when.add(runner.num_steps + 3)
            with pytest.raises(KeyboardInterrupt):
                call("interrupted", SamplingParams(max_tokens=100))
            assert text_of(llm.generate("after", PARAMS, use_tqdm=False)) == expected_text(
                "after", tokens=8
            )
            assert not runner.has_running()
        # A search's request has ended with the step.
        assert runner.aborted == [0, 2, 4]
        assert not llm.has_unfinished_requests(), "nobody waits for them"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_step_by_step(self, pressed):
        """What the step has made is there for the next one."""
        llm, runner, when = pressed
        llm.add_request("abc", SamplingParams(max_tokens=1), "one")
        when.add(0)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
        assert runner.num_steps == 1 and llm.has_unfinished_requests()
        [output] = llm.step()
        assert (output.request_id, output.finished, runner.num_steps) == ("one", True, 1)

    def test_while_a_step_takes_and_gives_back_the_lock(self):
        """At every line of that it waits; another thread gets the lock, and nothing is lost."""
        llm, answers = fake_llm(), []
        for number in itertools.count():
            llm.add_request("abc", SamplingParams(max_tokens=1))
            with _signal_at(number, FairLock.__enter__, FairLock.__exit__) as waited:
                try:
                    output, interrupted = llm.step(), False
                except KeyboardInterrupt:
                    output, interrupted = [], True
            assert interrupted == bool(waited)
            other = threading.Thread(
                target=lambda: answers.append(llm.has_unfinished_requests()), daemon=True
            )
            other.start()
            other.join(10)
            assert answers.pop() is interrupted
            [output] = output or llm.step()
            assert output.finished
            if not interrupted:
                break
        assert number > 2

    def test_a_second_one_as_the_lock_is_taken(self):
        lock = FairLock()
        lock._held = _Interrupted(lock._held)
        with pytest.raises(KeyboardInterrupt), lock:
            pass
        taken = []

        def take() -> None:
            with lock:
                taken.append(True)

        other = threading.Thread(target=take, daemon=True)
        other.start()
        other.join(10)
        assert taken

    def test_other_streams_go_on(self, pressed):
        llm, runner, when = pressed
        other = llm.stream("other", PARAMS)
        next(other)
        when.add(runner.num_steps + 1)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("interrupted", SamplingParams(max_tokens=100), use_tqdm=False)
        *_, last = other
        assert text_of([last]) == expected_text("other", tokens=8)

    def test_a_second_one_does_not_wait(self):
        reached = []
        with pytest.raises(KeyboardInterrupt), interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)
        assert reached == [1]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failure_of_the_model(caplog):
    """Said where it cannot be overlooked; the other outputs are whole."""
    outputs = fake_llm().generate([FAILING_PROMPT, "fine"], PARAMS, use_tqdm=False)
    [failed], [fine] = (output.outputs for output in outputs)
    assert (failed.finish_reason, failed.error, failed.text) == ("error", FAILURE, "on")
    assert (fine.finish_reason, fine.error) == ("length", None)
    assert fine.text == expected_text("fine", tokens=8)
    [record] = caplog.records
    assert record.levelname == "ERROR" and FAILURE in record.message


@contextlib.contextmanager
def _signal_at(number: int, *functions):
    """SIGINT before a line of functions, counted as they run; yields those that waited."""
    codes = {function.__code__ for function in functions}
    lines, waited = itertools.count(), []

    def trace(frame, event, _):
        if frame.f_code not in codes:
            return None
        if event == "line" and next(lines) == number:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
                waited.append(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield waited
    finally:
        sys.settrace(before)


class _Interrupted:
    """A lock whose first owner gets Ctrl-C as soon as it has it."""

    def __init__(self, lock) -> None:
        self._lock, self._interrupts = lock, True

    def acquire(self) -> None:
        self._lock.acquire()
        if self._interrupts:
            self._interrupts = False
            raise KeyboardInterrupt

    def __getattr__(self, name: str):
        return getattr(self._lock, name)


class _Template(ChatBytes):
    """Shows what the template gets."""

    def chat(self, messages, **options):
        return self.encode(f"{messages} {options}")


class TestChat:
    @pytest.fixture
    def prompt_of(self):
        llm = fake_llm()
        llm.tokenizer = _Template()

        def prompt_of(content, **options) -> str:
            messages = [{"role": "user", "content": content}]
            [output] = llm.chat(messages, PARAMS, use_tqdm=False, **options)
            return bytes(output.prompt_token_ids).decode()

        return prompt_of

    def test_parts_are_one_text(self, prompt_of):
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        assert prompt_of(parts) == prompt_of(["h", "i"]) == prompt_of("hi")
        assert "None" in prompt_of(None)

    @pytest.mark.parametrize(
        "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 3]
    )
    def test_parts_that_are_no_text(self, prompt_of, part):
        with pytest.raises(ValueError, match="a part of a message's content must be a text or"):
            prompt_of([part])

    def test_variables_of_the_template(self, prompt_of):
        found = prompt_of("hi", chat_template_kwargs={"thinking": True}, tools=None)
        assert found.endswith("{'tools': None, 'thinking': True}")
        assert prompt_of("hi", chat_template_kwargs=None, lora_request=None).endswith("{}")

    def test_tools(self):
        """Of a former answer, too, whose arguments templates read as dicts."""
        llm, tools = fake_llm(), [{"type": "function", "function": {"name": "f"}}]
        llm.tokenizer = _Template()
        call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        [output] = llm.chat(messages, PARAMS, use_tqdm=False, tools=tools)
        found = bytes(output.prompt_token_ids).decode()
        assert "'arguments': {'a': 1}" in found and found.endswith(f"{{'tools': {tools}}}")

    def test_refused(self, prompt_of):
        with pytest.raises(ValueError, match="chat does not take priority"):
            prompt_of("hi", priority=2)
        with pytest.raises(ValueError, match="chat_template_kwargs has a, which is an option"):
            prompt_of("hi", a=1, chat_template_kwargs={"a": 2})


class TestAsVLLMHasThem:
    """Prompts, arguments and methods as vLLM's users write them."""

    IDS = (104, 105, 33)

    @pytest.mark.parametrize(
        ("prompts", "texts"),
        [
            (IDS, [None]),
            ([np.array(IDS)], [None]),
            (np.array(IDS), [None]),
            (torch.tensor(IDS), [None]),
            (list(torch.tensor(IDS)), [None]),
            (torch.tensor([IDS, IDS]), [None, None]),
            ([np.array(IDS[:1]), np.array(IDS)], [None, None]),
            ([np.int64(token) for token in IDS], [None]),
            ({"prompt_token_ids": IDS}, [None]),
            ([{"prompt_token_ids": np.array(IDS)}, {"prompt": "hi!"}], [None, "hi!"]),
            ({"prompt": "hi!", "prompt_token_ids": IDS, "multi_modal_data": None}, ["hi!"]),
            (("hi!", list(IDS)), ["hi!", None]),
            ((one for one in ["hi!"]), ["hi!"]),
        ],
    )
    def test_prompts(self, prompts, texts):
        outputs = fake_llm().generate(prompts, PARAMS, False)
        assert [output.prompt for output in outputs] == texts
        assert outputs[-1].prompt_token_ids == list(self.IDS)
        assert {type(token) for token in outputs[-1].prompt_token_ids} == {int}
        assert outputs[-1].outputs[0].text == expected_text("hi!", tokens=8)

    def test_cache_salt(self):
        """Of all outputs of a prompt, and of all requests of a beam search."""
        runner = FakeRunner()
        llm, salted = fake_llm(runner), {"prompt_token_ids": self.IDS, "cache_salt": "x"}
        llm.generate(
            [salted, "hi!", {"prompt": "a", "cache_salt": "y"}], PARAMS.replace(n=2), False
        )
        assert runner.salts == [*"xx", None, None, *"yy"]
        llm.add_request(salted)
        llm.step()
        llm.beam_search([salted], BeamSearchParams(beam_width=2, max_tokens=2))
        assert runner.salts[6:] == [*"xxxx"]

    @pytest.mark.parametrize(
        ("prompt", "error"),
        [
            ({"prompt": "a", "multi_modal_data": 1}, "prompt 1: a prompt's dict must have"),
            ({"text": "a"}, "'prompt', a text, or 'prompt_token_ids', and nothing else but"),
            ({"prompt": 3}, "a prompt's dict must have"),
            (np.array([1.5]), "prompt 1: token ids must be integers, got"),
            (torch.tensor([[1, 2]]), "token ids must be integers"),
            (None, "token ids must be integers, got None"),
            ({"prompt": "a", "cache_salt": ""}, "prompt 1: cache_salt must be a text that is not"),
            ({"prompt": "a", "cache_salt": 7}, "cache_salt must be a text .* 1024 .*, got 7"),
            ({"prompt": "a", "cache_salt": "x" * 1025}, "cache_salt must be a text .*, got 'xx"),
        ],
    )
    def test_no_prompts(self, prompt, error):
        llm = fake_llm()
        with pytest.raises(ValueError, match=error):
            llm.generate(["a", prompt], PARAMS, False)
        assert not llm._requests.commands()

    @pytest.mark.parametrize("given", [{"prompt_token_ids": [[1]]}, {}])
    def test_token_ids_by_their_old_name(self, given):
        with pytest.raises(ValueError, match=r"generate takes token ids as prompts=\[\[1, 2, 3\]"):
            fake_llm().generate(**given)

    def test_numbers_of_numpy(self):
        params = SamplingParams(
            max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=np.array([7])
        )
        plain = SamplingParams(max_tokens=3, temperature=0.5, stop_token_ids=[7])
        assert params == plain.clone() == plain and type(params.max_tokens) is int
        assert SamplingParams(stop_token_ids=[torch.tensor(7)]).stop_token_ids == (7,)
        with pytest.raises(ValueError, match="max_tokens must be an integer of at least 1"):
            SamplingParams(max_tokens=np.int64(0))

    def test_progress(self, capsys):
        shown = []

        class Bar(tqdm):
            def close(self):
                shown.append((self.n, self.total))
                super().close()

        llm = fake_llm()
        llm.generate(["a", "b"], PARAMS, Bar)
        llm.chat([{"role": "user", "content": "a"}], PARAMS, Bar)
        assert (2, 2) in shown and (1, 1) in shown
        capsys.readouterr()
        llm.generate("a", PARAMS, False)
        assert not capsys.readouterr().err

    def test_what_is_not_here(self):
        llm = fake_llm()
        assert llm.generate("a", PARAMS, False, lora_request=None, priority=None)
        with pytest.raises(ValueError, match="lora_request must be a LoRARequest, got 1"):
            llm.generate("a", PARAMS, False, lora_request=1)

    def test_priority(self):
        runner = FakeRunner(scheduling_policy="priority")
        llm = fake_llm(runner)
        llm.generate(["a", "b"], PARAMS.replace(n=2), False, priority=np.array([3, -1]))
        llm.generate(["a"], PARAMS, False)
        llm.add_request("a", PARAMS, priority=2)
        llm.step()
        assert runner.priorities == [3, 3, -1, -1, 0, 2]

    @pytest.mark.parametrize(
        ("options", "priority", "error"),
        [
            ({}, [0, 1], "prompt 1: priority needs scheduling_policy='priority', got 'fcfs'"),
            ({"scheduling_policy": "priority"}, [0], "there are 2 prompts and 1 priorities"),
            ({"scheduling_policy": "priority"}, 1, "priority must be a list of one number"),
            ({"scheduling_policy": "priority"}, [0, "1"], "priority must be an integer, got '1'"),
        ],
    )
    def test_priorities_that_are_refused(self, options, priority, error):
        with pytest.raises(ValueError, match=error):
            fake_llm(FakeRunner(**options)).generate(["a", "b"], PARAMS, False, priority=priority)

    def test_the_tokenizer(self):
        llm = fake_llm()
        assert llm.get_tokenizer() is llm.tokenizer
        llm.tokenizer = HuggingFaceTokenizer(byte_level())
        assert llm.get_tokenizer().eos_token == "<eos>"
        llm.tokenizer = None
        with pytest.raises(ValueError, match="the model came without a tokenizer"):
            llm.get_tokenizer()

    @pytest.mark.parametrize("name", ["embed", "encode", "classify", "score"])
    def test_other_models(self, name):
        with pytest.raises(ValueError, match=rf"^LLM\.{name} needs a pooling model; .*generate$"):
            getattr(fake_llm(), name)(["a"], ["b"])
