"""The engine: the loop that keeps the host one step ahead of the device, and its asyncio face."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np
import torch

from engine.admission import Backlog
from engine.calibration import choose_step_tokens
from engine.config import EngineConfig
from engine.device import choose_device, choose_dtype, choose_num_blocks, make_runner, warm_up
from engine.grammar import Grammars
from engine.model import PagedModel
from engine.request import EngineUnavailable, FinishReason, Output, Request, RequestError, State
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.stats import EngineStats, Reading, sample
from engine.timeline import Recording, Timeline
from engine.vocabulary import load_vocabulary

logger = logging.getLogger(__name__)

Sink = Callable[[Output], None]
Command = Callable[[], object]


class AsyncEngine:
    """One model on one device, shared by any number of requests.

    `start` once, from the event loop that will use it; every other method is called on that loop.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.failure: str | None = None
        """Why the engine broke, if it did."""
        self.failed: asyncio.Future[str]
        """From `start` on: done when the engine breaks, before anybody else is told. Says why."""
        self.context_length = 0
        self.vocab_size = 0
        self.eos_token_ids: tuple[int, ...] = ()
        self.device = "none"
        self.gpu_uuid: str | None = None
        """As CUDA names it; None on a CPU."""
        self.startup_s: dict[str, float] = {}
        """Seconds of the parts of the start: `weights`, `compile` (with sizing the cache), `capture`."""
        self._started = False
        self._closed = False
        self._alive = True
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._live: dict[str, tuple[Request, Sink]] = {}
        self._taken, self._added = (0, 0), (0, 0)  # requests and their tokens: by `submit`, by the scheduler
        self._aborted: Counter[str] = Counter()
        self._backlog = Backlog(
            config.max_running_requests + config.max_waiting_requests, config.max_waiting_tokens
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self.timeline = Timeline(annotate=torch.cuda.nvtx.range if config.nvtx else None)
        self._thread: threading.Thread | None = None

    # Life

    async def start(self) -> None:
        """Load the model, size the cache and start the loop. Raises what goes wrong in that.

        Once only: `RuntimeError` the second time, or after `stop`.
        """
        if self._thread is not None or self._closed:
            raise RuntimeError("an engine starts once")
        self._asyncio = asyncio.get_running_loop()
        self.failed, self._over = self._asyncio.create_future(), self._asyncio.create_future()
        ready: asyncio.Future[None] = self._asyncio.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        try:
            await ready
        except BaseException as error:  # cancellation included
            self.failure = f"it did not start: {error!r}"
            self._inbox.put(self._end)
            raise
        self._started = True

    async def drain(self) -> None:
        """Accept nothing more; returns when every accepted request has ended."""
        self._closed = True
        await self._idle.wait()

    async def stop(self) -> None:
        """Abort what is left and end the loop and its lanes."""
        self._closed = True
        for request_id in list(self._live):
            self.abort(request_id, "stopped")
        if self.healthy:
            await self._idle.wait()
        self._inbox.put(self._end)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _end(self) -> None:
        self._alive = False

    @property
    def healthy(self) -> bool:
        return self.failure is None and self._thread is not None and self._thread.is_alive()

    # Requests

    def submit(self, request: Request, sink: Sink, *, promised: bool = False) -> None:
        """Accept a request; `sink` is then called with each of its outputs, on the event loop.

        One that is `promised` (another engine had accepted it) is not refused for lack of room.
        Raises `RequestError` naming the field for a request that can never be served, `QueueFull`
        if too many wait, `EngineUnavailable` if the engine takes no requests.
        """
        if self._closed or not self.healthy or not self._started:
            raise EngineUnavailable(self.failure or "the engine is not accepting requests")
        self._scheduler.check_request(request)
        biased = [token for token, _ in request.sampling.logit_bias]
        named = (("prompt", request.prompt), ("generated", request.generated), ("logit_bias", biased))
        for name, tokens in named:
            ids = np.asarray(tokens if len(tokens) else [0])
            if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.vocab_size:
                raise RequestError(f"{name} has other things than token ids 0..{self.vocab_size - 1}", name)
        if request.id in self._live:
            raise RequestError(f"a request with id {request.id!r} is running", "id")
        now = time.monotonic()
        if not promised:
            self._backlog.check(request, len(self._live), now)
        self._scheduler.follow(request)
        self._backlog.add(request, now)
        self._live[request.id] = (request, sink)
        self._taken = _with(self._taken, request)
        self._idle.clear()
        self._inbox.put(lambda: self._add(request))

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        """The outputs of a request as they come. Leaving the iteration early aborts it."""
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        self.submit(request, outputs.put_nowait)
        try:
            while True:
                output = await outputs.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._abort(request, "cancelled")

    def abort(self, request_id: str, cause: str = "cancelled") -> None:
        """End a request at the next commit. Nothing happens if it has ended, or was never there."""
        if request_id in self._live:
            self._abort(self._live[request_id][0], cause)

    def _abort(self, request: Request, cause: str) -> None:
        def abort() -> None:
            output = self._scheduler.abort(request)
            if output is not None:
                self._aborted[cause] += 1
                self._publish([output])

        if request.finish_reason is None:
            self._inbox.put(abort)

    def stats(self) -> EngineStats:
        """Raises `EngineUnavailable` before `start` is through."""
        if not hasattr(self, "_scheduler"):
            raise EngineUnavailable("the engine has not started")
        scheduler, counters, blocks = self._scheduler, self._scheduler.counters, self._scheduler.counts()
        requests, tokens = (taken - added for taken, added in zip(self._taken, self._added, strict=True))
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + requests,
            prefill_tokens=scheduler.prefill_tokens + tokens,
            rows_free=scheduler.rows.num_free,
            blocks_free=blocks.free,
            blocks_cached=blocks.cached,
            blocks_owned=blocks.owned,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            wasted_tokens=counters.wasted_tokens,
            preemptions=counters.preemptions,
            admitted=counters.admitted,
            finished={reason.value: n for reason, n in list(counters.finished.items())},
            aborted=dict(self._aborted),
        )

    async def reading(self, after: int, most: int) -> Reading:
        """What is to be exported. Of steps after step `after`, and of waits, at most so many, by lot."""
        waited, steps = self._scheduler.counters.queue_times, self.timeline.steps_after(after)
        times = [waited.popleft() for _ in range(len(waited))]
        last = steps[-1].step if steps else after
        return Reading(self.stats(), self.timeline.totals, sample(times, most), sample(steps, most), last)

    async def recent(self, steps: int) -> Recording:
        """The last steps, and the host's phases around them."""
        return self.timeline.recent(steps)

    async def turn(self, call: Callable[[], object] = lambda: None) -> None:
        """Return once the loop has come round and made `call`, on its thread: so it does not hang.

        Raises `EngineUnavailable` if the loop is over.
        """
        if not self.healthy:
            raise EngineUnavailable(self.failure or "the engine does not run")
        done: asyncio.Future[None] = self._asyncio.create_future()
        for each in (call, partial(self._asyncio.call_soon_threadsafe, _settle, done, None)):
            self._inbox.put(each)
        await asyncio.wait((done, self._over), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise EngineUnavailable(self.failure or "the engine has stopped")

    # The engine's thread

    def _run(self, ready: asyncio.Future[None]) -> None:
        call = self._asyncio.call_soon_threadsafe
        try:
            self._scheduler, self._runner = self._build()
        except BaseException as error:
            call(_settle, ready, error)
            call(_settle, self._over, None)
            return
        self.max_tokens_per_step = self._scheduler.max_tokens_per_step
        call(_settle, ready, None)
        failure = None
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the engine's loop failed")
            failure = f"{type(error).__name__}: {error}"
        try:
            self._runner.close()
        except BaseException:
            logger.exception("the engine's lanes failed to end")
        if failure is not None:
            call(self._fail, failure)
        call(_settle, self._over, None)

    def _build(self) -> tuple[Scheduler, Runner]:
        config, device = self.config, choose_device(self.config)
        if config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        on_gpu = device.type == "cuda"
        with self._stage("weights", f"loading {config.model}"):
            model = PagedModel.load(config, device, choose_dtype(config, device))
        compiles = on_gpu and config.compile
        max_blocks = -(-model.context_length // config.block_size)
        with self._stage("compile", "compiling and sizing the cache" if compiles else "sizing the cache"):
            if compiles:
                model.compile()
            num_blocks = choose_num_blocks(config, model, max_blocks, device)
        scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=config.block_size,
            context_length=model.context_length,
            max_running_requests=config.max_running_requests,
            max_tokens_per_step=config.max_tokens_per_step,
            prefix_caching=config.prefix_caching,
            identity=config.model.encode(),
            grammars=Grammars(partial(load_vocabulary, config, model.vocab_size, model.eos_token_ids)),
        )
        max_blocks = scheduler.rows.blocks.shape[1]
        runner = make_runner(config, model, num_blocks, max_blocks, device, config.depth)
        try:
            if compiles:
                with self._stage("compile", "warming up"):
                    runner.compile()
                    warm_up(runner)
            if on_gpu and config.cuda_graphs:
                with self._stage("capture", "capturing steps"):
                    runner.capture(progress=logger.info)
            scheduler.grammars.wait()  # what loads them would be measured, too
            scheduler.max_tokens_per_step = choose_step_tokens(config, runner, num_blocks)
        except BaseException:
            runner.close()
            raise
        if on_gpu:
            torch.cuda.synchronize(device)  # buffers are zeroed on another stream than the lanes'
        self.context_length = scheduler.context_length
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.device = str(device)
        self.gpu_uuid = str(torch.cuda.get_device_properties(device).uuid) if on_gpu else None
        return scheduler, runner

    @contextlib.contextmanager
    def _stage(self, part: str, what: str) -> Iterator[None]:
        """A part of the start: said when it begins and when it is through."""
        logger.info("%s", what)
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.startup_s[part] = self.startup_s.get(part, 0.0) + seconds
        logger.info("%s took %.1f s", what, seconds)

    def _loop(self) -> None:
        """The heart: while the device runs step N, the host prepares step N+1."""
        scheduler, timeline, depth = self._scheduler, self.timeline, self.config.depth
        apply_inbox, publish = timeline.inbox(self._apply_inbox), timeline.publish(self._publish)
        schedule, commit = timeline.schedule(scheduler.schedule), timeline.commit(scheduler.commit)
        launch, collect = timeline.launch(self._runner.launch), timeline.collect(self._runner.collect)
        while self._alive:
            apply_inbox(block=not scheduler.has_work and not scheduler.num_in_flight)
            publish(scheduler.expire(time.monotonic()))
            plan = schedule()
            if plan is not None:
                launch(plan)
                if len(plan.constrained):  # by grammars, which need all tokens before
                    while scheduler.num_in_flight > 1:
                        publish(commit(collect()))
                    self._runner.constrain(scheduler.masks())
            in_flight = scheduler.num_in_flight
            if in_flight and (in_flight == depth or plan is None):
                result = collect()  # but for grammars, the only place where the host waits for the device
                publish(commit(result))
            elif plan is None and scheduler.has_work:
                raise RuntimeError("requests wait and nothing can be scheduled")

    def _add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except Exception as error:  # of this request alone: the others go on
            logger.exception("request %s could not be added", request.id)
            request.state, request.finish_reason = State.FINISHED, FinishReason.ERROR
            self._publish([Output(request, len(request.generated), (), FinishReason.ERROR, str(error))])
        self._added = _with(self._added, request)

    def _apply_inbox(self, block: bool) -> None:
        """Run what was asked for since the last turn; with nothing else to do, wait for it."""
        try:
            while True:
                self._inbox.get(block)()
                block = False
        except Empty:
            pass

    def _publish(self, outputs: list[Output]) -> None:
        if outputs:
            self._asyncio.call_soon_threadsafe(self._deliver, outputs)

    # Back on the event loop

    def _deliver(self, outputs: list[Output]) -> None:
        now, live, waiting = time.monotonic(), self._live, self._backlog.waiting
        for output in outputs:
            request = output.request
            if request in waiting:
                self._backlog.remove(request, now, served=bool(output.tokens))
            if request.id not in live:
                continue
            _, sink = live[request.id]
            if output.finish_reason is not None:
                del live[request.id]
            try:
                sink(output)
            except Exception:
                logger.exception("the reader of request %s failed", request.id)
                self._abort(request, "reader_failed")
        if not live:
            self._idle.set()

    def _fail(self, failure: str) -> None:
        """The loop is over: end every request with the error."""
        self.failure = failure
        self.failed.set_result(failure)
        outputs = []
        for request, _ in self._live.values():
            with contextlib.suppress(Exception):  # the books may be what failed
                self._scheduler.abort(request, FinishReason.ERROR)
            outputs.append(Output(request, request.num_output, (), FinishReason.ERROR, failure))
        self._deliver(outputs)


def _with(count: tuple[int, int], request: Request) -> tuple[int, int]:
    return count[0] + 1, count[1] + len(request.prompt) + len(request.generated)


def _settle(ready: asyncio.Future[None], error: BaseException | None) -> None:
    if ready.done():  # cancelled meanwhile
        return
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(error)
