"""``AsyncLLM``: cumulative outputs for tasks of one event loop, and requests that are aborted."""

import asyncio
import contextlib
import signal
import threading

import pytest
import torch

from absorbed_mla import LLM, AsyncLLM, SamplingParams
from tests.support import needs
from tests.support.llm import (
    FAILING_PROMPT,
    FAILURE,
    LOGPROB,
    FakeRunner,
    ctrl_c_interrupts,
    expected_text,
    fake_llm,
    tiny_folder,
)

pytest.importorskip("prometheus_client")

LONG = SamplingParams(max_tokens=200)


def run(check, runner: FakeRunner | None = None) -> FakeRunner:
    """Run ``check(llm)`` in a loop; returns the runner, at which nothing is left."""
    runner = runner or FakeRunner()
    runner.step_seconds = 0.001

    async def main():
        async with AsyncLLM.from_llm(fake_llm(runner)) as llm:
            await asyncio.wait_for(check(llm), 60)
            while llm._llm.has_unfinished_requests():
                await asyncio.sleep(0.01)
            assert not llm._streams and not llm._service._streams

    asyncio.run(main())
    return runner


async def collect(llm, *args, **options) -> list:
    return [output async for output in llm.generate(*args, **options)]


class TestOutputs:
    def test_beside_others(self):
        """Each is whole at its time, though its request goes on, and the last one is the answer."""

        async def check(llm):
            params = SamplingParams(max_tokens=50, logprobs=1, n=2)
            found = await asyncio.gather(
                *(collect(llm, prompt, params, prompt) for prompt in ("hello", "other", "x"))
            )
            for prompt, outputs in zip(("hello", "other", "x"), found, strict=True):
                lengths = [len(output.outputs[0].token_ids) for output in outputs]
                assert lengths == sorted(set(lengths)) and lengths[-1] == 50 and len(lengths) > 1
                assert {output.request_id for output in outputs} == {prompt}
                assert [output.finished for output in outputs] == [False] * (len(lengths) - 1) + [
                    True
                ]
                for output in outputs:
                    for index, one in enumerate(output.outputs):
                        count = len(one.token_ids)
                        assert one.text == expected_text(prompt, index, count)
                        assert len(one.logprobs) == count
                        assert one.cumulative_logprob == pytest.approx(LOGPROB * count)
                        assert one.finish_reason == ("length" if output.finished else None)

        assert run(check).num_added == 6

    def test_prompts(self):
        async def check(llm):
            salted = {"prompt_token_ids": [104, 105], "cache_salt": "x"}
            for prompt in (salted, torch.tensor([104, 105])):
                [*_, last] = await collect(llm, prompt)
                assert last.outputs[0].text == expected_text("hi")
            assert (await llm.get_tokenizer()).vocab_size == 257

        assert run(check).salts == ["x", None]

    def test_priority(self):
        async def check(llm):
            with pytest.raises(ValueError, match="priority needs scheduling_policy='priority'"):
                await collect(llm, "a", priority=1)

        run(check)

    def test_a_stop_string(self):
        async def check(llm):
            [*_, last] = await collect(llm, "abc", SamplingParams(stop="ba"))
            [one] = last.outputs
            assert (one.text, one.finish_reason, one.stop_reason) == ("c", "stop", "ba")

        run(check)

    @needs.no_gpu
    @pytest.mark.usefixtures("forked_python")
    def test_a_model(self, tmp_path):
        folder, params = tiny_folder(tmp_path / "hf"), SamplingParams(max_tokens=12, temperature=0)
        prompts = ["one", "two, three", "four five six"]
        with LLM(folder, tokenizer="bytes") as llm:
            expected = [one.outputs for one in llm.generate(prompts, params, False)]

        async def main():
            async with AsyncLLM(folder, tokenizer="bytes") as llm:
                found = await asyncio.gather(*(collect(llm, one, params) for one in prompts))
                return [outputs[-1].outputs for outputs in found]

        assert asyncio.run(main()) == expected


def test_control():
    """As the server's endpoints, of which ``test_rl_endpoints.py`` has the rest."""

    async def check(llm):
        task = asyncio.ensure_future(collect(llm, "hello", LONG))
        while not runner.has_running():
            await asyncio.sleep(0.01)
        assert not await llm.reset_prefix_cache() and await llm.reset_prefix_cache(True)
        await llm.pause_generation("keep")
        await llm.update_weights("tcp://127.0.0.1:1", keep_cache=True)
        assert await llm.is_paused() and not task.done()
        await llm.resume_generation()
        assert (await task)[-1].outputs[0].text == expected_text("hello", tokens=200)
        await llm.sleep(2, mode="wait")
        with pytest.raises(RuntimeError, match="the model is asleep"):
            await collect(llm, "abc")
        with pytest.raises(RuntimeError, match="call update_weights"):
            await llm.wake_up()
        await llm.update_weights("tcp://127.0.0.1:1")
        await llm.wake_up(["kv_cache"])
        assert not await llm.is_sleeping() and await collect(llm, "abc")

    runner = FakeRunner()
    run(check, runner)
    assert [keep for _, keep, *_ in runner.updates] == [True, False]


class TestEnds:
    def test_abort(self):
        """The reader gets what there is; others go on."""

        async def check(llm):
            other = asyncio.ensure_future(collect(llm, "other", LONG))
            found = []
            async for output in llm.generate("hello", LONG, "mine"):
                found.append(output)
                if len(found) == 3:
                    await llm.abort("mine")
                    await llm.abort("nobody's")
            [one] = found[-1].outputs
            assert found[-1].finished and one.finish_reason == "abort"
            assert one.text == expected_text("hello", tokens=len(one.token_ids)) != ""
            assert (await other)[-1].outputs[0].text == expected_text("other", tokens=200)

        assert len(run(check).aborted) == 1

    def test_abort_before_it_has_begun(self):
        """While another thread looks for its tokens."""
        go = threading.Event()

        class Slow(list):
            def __iter__(self):
                go.wait(10)
                return super().__iter__()

        async def check(llm):
            task = asyncio.ensure_future(collect(llm, Slow(b"abc"), LONG, "slow"))
            await asyncio.sleep(0.02)
            await llm.abort("slow")
            await asyncio.sleep(0.02)
            go.set()
            [*_, last] = await task
            assert last.outputs[0].finish_reason == "abort"

        run(check)

    def test_leaving(self):
        async def check(llm):
            async with contextlib.aclosing(llm.generate("hello", LONG)) as outputs:
                await anext(outputs)
            task = asyncio.ensure_future(collect(llm, "cancelled", LONG))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        assert len(run(check).aborted) == 2

    def test_ctrl_c(self):
        """Ends the loop; the model can be used on, in another one."""
        runner = FakeRunner()
        runner.step_seconds = 0.001
        llm = AsyncLLM.from_llm(fake_llm(runner))

        async def press():
            async for _ in llm.generate("hello", LONG):
                signal.raise_signal(signal.SIGINT)

        with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
            asyncio.run(press())
        [*_, last] = asyncio.run(collect(llm, "after"))
        assert last.outputs[0].text == expected_text("after") and runner.aborted == [0]
        llm.close()

    def test_ids(self):
        """Those that are made are nobody's; one that runs is refused, and runs on."""

        async def check(llm):
            first = llm.generate("hello", LONG, "request-0")
            await anext(first)
            [*_, last] = await collect(llm, "abc")
            assert last.request_id == "request-1"
            with pytest.raises(ValueError, match="'request-0' is that of a request that runs"):
                await collect(llm, "abc", None, "request-0")
            assert [output async for output in first][-1].outputs[0].finish_reason == "length"

        assert not run(check).aborted

    def test_failures(self):
        async def check(llm):
            with pytest.raises(ValueError, match="the prompt is empty"):
                await collect(llm, "")
            [*_, last] = await collect(llm, FAILING_PROMPT)
            [one] = last.outputs
            assert (one.finish_reason, one.error, one.text) == ("error", FAILURE, "on")

        run(check)

    def test_closed(self):
        async def main():
            llm = AsyncLLM.from_llm(fake_llm())
            outputs = llm.generate("a" * 10, SamplingParams(max_tokens=500))
            await anext(outputs)
            llm.close()
            with pytest.raises(RuntimeError):
                async for _ in outputs:
                    pass
            with pytest.raises(RuntimeError, match="shutting down"):
                await collect(llm, "abc")

        asyncio.run(main())

    def test_torchrun(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="AsyncLLM starts the processes of its model, got"):
            AsyncLLM("nowhere")
