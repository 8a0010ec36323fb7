"""Traffic: requests that come in bursts, some of them aborted, each answer compared."""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from absorbed_mla import LLM
from absorbed_mla.serving.megatron_engine.names import EVICT_CACHED
from absorbed_mla.serving.outputs import RequestOutput
from checks.life.census import census
from checks.life.requests import Entry, difference

# Requests that run or wait together: few enough that steps follow each other, or far too many.
_TOGETHER = (3, 10, 24, 80)
# Conversations are drawn from so many entries, which move on.
_RECENT = 40
_MOST_FAULTS, _MOST_IDLE_STEPS = 5, 5000


class Fault(Exception):
    """A request that has another answer than alone, or an engine that leaks."""


@dataclass
class _Sent:
    number: int
    entry: Entry
    # To be aborted where it waits, in its prompt, or after so many tokens; None: it is not.
    abort: tuple[str, int] | None


class Traffic:
    """Requests for one engine.

    Args:
        llm: Awake; used by nobody else.
        pool: Requests with their answers.
        name: Determines all random numbers.
        aborted: Share of requests that are aborted.

    Attributes:
        requests: That have been sent, numbered in this order.
        planned: Those of the sizes that :meth:`run` has taken.
        counts: By what has happened.
        faults: One text for each.
        ended: Requests that had ended when figures were counted, each time.
        figures: Of :func:`census`, each time.
    """

    def __init__(self, llm: LLM, pool: Sequence[Entry], name: str, aborted: float) -> None:
        self._llm, self._pool, self._aborted = llm, pool, aborted
        self._plain = [entry for entry in pool if entry.is_plain] or pool
        # The engine forgets adapters of requests that have ended when the next one comes.
        self._last = next((entry for entry in pool if entry.adapter), pool[0])
        self._rng = random.Random(name)
        self._sent: dict[str, _Sent] = {}
        # Numbers of those that wait for a slot.
        self._held: set[int] = set()
        self.requests = self.planned = 0
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.ended: list[int] = []
        self.figures: list[dict[str, float]] = []
        allocator = self._engine.host.context.kv_block_allocator
        evict = EVICT_CACHED.of(allocator)

        def count_and_evict(blocks: int) -> bool:
            self.counts["released blocks"] += blocks
            return evict(blocks)

        EVICT_CACHED.replace(allocator, count_and_evict)

    def report(self) -> dict:
        """As JSON; of the figures the first and the last ones."""
        counts = self.counts + Counter(asdict(self._llm.statistics()))
        shown = [self.figures[i] for i in (0, -1) if self.figures]
        about = {"requests": self.requests, "faults": self.faults}
        return about | {"counts": counts, "figures": shown}

    def run(self, sizes: Iterable[int], until: float, say: Callable[[], None]) -> None:
        """Send requests until there are enough or it is late.

        Args:
            sizes: After so many all have to end, and figures are counted; again and again.
            until: A time of ``time.monotonic()``.
            say: Called each time.

        Raises:
            Fault: If the engine fails, or there are too many faults.
        """
        for size in sizes:
            self.planned += size
            self._run_some(size - 1, until)
            # So that what is left of the last steps is always the same.
            self._send(self._last)
            self._run_some(0, until)
            self._look()
            say()
            if time.monotonic() > until:
                return

    def _run_some(self, count: int, until: float) -> None:
        together, plain = self._rng.choice(_TOGETHER), self._rng.random() < 0.5
        last, idle = self.requests + count, 0
        while self.requests < last or self._llm.has_unfinished_requests():
            if time.monotonic() > until:
                last = self.requests
            room = min(last - self.requests, together - len(self._sent))
            if room > 0 and (not self._sent or self._rng.random() < 0.3):
                for _ in range(self._rng.randint(1, room)):
                    self._send(*self._drawn(plain))
            self._abort_some()
            outputs = self._step()
            scheduler = self._engine.scheduler
            own = scheduler is not None and scheduler.last is not None
            self.counts["overlap scheduler's steps" if own else "Megatron's steps"] += 1
            ended = [one for one in outputs if one.finished]
            for one in ended:
                self._compare(self._sent.pop(one.request_id), one)
            idle = 0 if ended else idle + 1
            if idle > _MOST_IDLE_STEPS:
                raise Fault(f"no request has ended in {idle} steps: {list(self._sent.values())}")

    def _step(self) -> list[RequestOutput]:
        try:
            return self._llm.step()
        except Exception as error:
            numbers = sorted(sent.number for sent in self._sent.values())
            raise Fault(f"a step of requests {numbers} raises {traceback.format_exc()}") from error

    @property
    def _engine(self):
        return self._llm._runner._engine

    def _drawn(self, plain: bool) -> tuple[Entry, tuple[str, int] | None]:
        rng, pool = self._rng, self._plain if plain else self._pool
        # Mostly of some conversations, whose place in the pool moves on.
        near = rng.random() < 0.7
        place = self.requests // 4 + rng.randrange(_RECENT) if near else rng.randrange(len(pool))
        entry = pool[place % len(pool)]
        abort = None
        if rng.random() < self._aborted:
            abort = rng.choice(("waiting", "prefill", "decode")), rng.randint(1, 12)
        return entry, abort

    def _send(self, entry: Entry, abort: tuple[str, int] | None = None) -> None:
        name = self._llm.add_request(entry.prompt, entry.params, lora_request=entry.adapter)
        self._sent[name] = _Sent(self.requests, entry, abort)
        self.requests += 1

    def _abort_some(self) -> None:
        held = {one.number for one in self._engine._adapters.waiting}
        self.counts["waited for an adapter's slot"] += len(held - self._held)
        self._held, waiting = held, {*self._engine.host.waiting_request_ids, *held}
        for name, sent in self._sent.items():
            request = self._llm._requests._requests[name]
            if sent.abort is None or request.output.finished:
                continue
            tokens = max(len(one.token_ids) for one in request.output.outputs)
            where = "decode" if tokens else "prefill"
            if not tokens and (not request.numbers or not waiting or request.numbers[0] in waiting):
                where = "waiting"
            wanted, count = sent.abort
            if where == wanted != "decode" or tokens >= count:
                self._llm.abort(name)
                self.counts[f"aborted in {where}"] += 1

    def _compare(self, sent: _Sent, output: RequestOutput) -> None:
        counts = self.counts
        counts["ended"] += 1
        adapter, constrained = sent.entry.adapter, sent.entry.params.structured_outputs
        counts["with an adapter"] += adapter is not None
        counts["constrained"] += constrained is not None
        counts["constrained, with an adapter"] += None not in (adapter, constrained)
        counts["cached prompt tokens"] += output.num_cached_tokens or 0
        for got, want in zip(output.outputs, sent.entry.outputs, strict=True):
            counts[f"outputs, {got.finish_reason}"] += 1
            counts["tokens"] += len(got.token_ids)
            if wrong := difference(got, want):
                self._fault(f"request {sent.number}: {wrong}\n  {sent.entry.params}", sent)

    def _fault(self, text: str, sent: _Sent) -> None:
        self.faults.append(f"{text}\n  prompt {sent.entry.prompt}")
        if len(self.faults) >= _MOST_FAULTS:
            raise Fault("too many faults")

    def _look(self) -> None:
        """Check an engine without requests, and count what there is."""
        llm = self._llm
        try:
            llm.require_no_leak()
        except RuntimeError as error:
            raise Fault(f"after {self.requests} requests: {error}") from error
        now = llm.statistics()
        if now.used_blocks or now.running or now.waiting or self._sent:
            raise Fault(f"after {self.requests} requests, of which none is left: {now}")
        self.ended.append(self.requests)
        self.figures.append(census())
