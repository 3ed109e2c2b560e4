"""What is measured on a running application of several engines, phase by phase."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arrivals import Arrival, random_prompts
from benchmarks.fleet import CpuClock, Fleet, Steering, processes
from benchmarks.latency import quantiles, summary, window
from benchmarks.targets import Chats, Clients, Seen, now
from benchmarks.workloads import SHAPES
from engine.engine import EngineStats

RAMP = 2.0
"""Seconds of load before a measurement begins."""

RATES = {"8b": 12.0, "0.6b": 40.0}
"""Requests a second for each replica, in the comparison of policies."""


class Phases:
    """One start of one shape, and its phases."""

    def __init__(
        self, args: argparse.Namespace, shape: str, fleet: Fleet, clients: Clients, ends: float
    ) -> None:
        self.args, self.shape, self.fleet, self.clients = args, shape, fleet, clients
        self.ends = ends
        self.model = fleet.settings.model
        self.rates: dict[str, float] = {}
        """Tokens a second of earlier phases."""

    def chats(self, replicas: int, seed: int = 0) -> Chats:
        a = self.args
        return Chats(a.streams * replicas, a.prompt, a.output, SHAPES[self.shape]["vocab_size"], seed)

    def write(self, phase: str, **figures: Any) -> None:
        a = self.args
        line = {
            "phase": phase,
            "shape": self.shape,
            "replicas": a.replicas[-1],
            "router_replicas": a.routers,
            "ingress": a.ingress,
            "engine": "GPU" if a.paced is None else f"paced: a step takes {a.paced:g} times an H200's time",
            **figures,
            "device": a.device,
            "cores": os.cpu_count(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "version": a.version,
        }
        print(json.dumps(line), flush=True)
        if a.out:
            with a.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    async def phase(self, name: str, seconds: float, run: Callable[[], Awaitable[None]]) -> None:
        """Run it if there is time; what goes wrong in it is told and ends nothing else."""
        if now() + seconds > self.ends:
            print(f"skipped, no time is left: {self.shape} {name}", file=sys.stderr, flush=True)
            return
        begin = now()
        try:
            await asyncio.wait_for(run(), min(4 * seconds + 30, self.ends - begin))
            await asyncio.wait_for(self.idle(), 15)
        except Exception as error:
            self.write(name, error=repr(error)[:500])
        print(f"{self.shape} {name}: {now() - begin:.1f} s", file=sys.stderr, flush=True)

    async def idle(self) -> None:
        """Return when no replica that lives computes anything."""
        while True:
            results = self.fleet.engines.broadcast("stats").results
            found = await asyncio.to_thread(results, return_exceptions=True)
            stats = [each for each in found if isinstance(each, EngineStats)]
            if not any(each.running or each.waiting for each in stats):
                return
            await asyncio.sleep(0.1)

    # Phases

    async def about(self) -> None:
        self.write("about", each=await self.fleet.about())

    async def bare(self) -> None:
        """The engine of one replica with nothing around it."""
        found = await self.fleet.engines.bare.remote(self.chats(1), RAMP, self.args.seconds)
        self.rates["bare"] = found["output_tokens_per_s"]
        self.write("bare", **found | {"replicas": 1, "router_replicas": 0, "ingress": None})

    @asynccontextmanager
    async def load(
        self, chats: Chats, urls: list[str], seconds: float
    ) -> AsyncIterator[tuple[float, float, asyncio.Task[list[Seen]]]]:
        """Open streams; the block runs from when they are up to speed. Gives its first and last second."""
        await self.clients.start()
        begin = now() + 0.3
        first, last = begin + RAMP, begin + RAMP + seconds
        task = asyncio.create_task(self.clients.keep(urls, self.model, chats, begin, last))
        await asyncio.sleep(first - now())
        yield first, last, task
        await task

    async def http(self, replicas: int, routers: int, ingress: str) -> None:
        """As many streams as `replicas` engines have rows, all of them busy."""
        Steering(replicas=replicas).apply()
        urls = self.fleet.urls(ingress)
        urls = urls[:routers] if ingress == "direct" else urls
        async with self.load(self.chats(replicas), urls, self.args.seconds) as (first, last, task):
            clock = CpuClock()
            await asyncio.sleep(max(0.0, last - 1 - now()))
            gpus = await asyncio.to_thread(self.fleet.metrics, "gpu_utilization")
            await asyncio.sleep(last - now())
            cores = clock.cores()
        found = window(task.result(), first, last)
        rate = found["output_tokens_per_s"]
        self.rates[f"{ingress} {replicas}"] = rate
        one = self.rates.get(f"{ingress} 1")
        bare = self.rates.get("bare")
        self.write(
            "http",
            **found | {"replicas": replicas, "router_replicas": routers, "ingress": ingress},
            scaling=rate / one if one else None,
            http_cost=1 - rate / (bare * replicas) if bare else None,
            streams=self.args.streams * replicas,
            cpu=cores,
            cpu_us_per_token={
                kind: round(each["all"] / rate * 1e6, 2) for kind, each in cores.items() if rate
            },
            gpu_utilization=gpus,
        )

    async def routing(self, tokens: bool) -> None:
        """Requests that share prefixes, four to each, placed by what is cached where, or by queues only."""
        a, replicas = self.args, self.args.replicas[-1]
        Steering(tokens=tokens).apply()
        n, rate = 128 * replicas, RATES[self.shape] * replicas / (a.paced or 1)
        n = min(n, int(rate * a.seconds * 2))
        rng, vocab = np.random.default_rng([3, tokens]), SHAPES[self.shape]["vocab_size"]
        prefixes = random_prompts(rng, [2048] * max(1, n // 4), vocab)
        ends = random_prompts(rng, [64] * n, vocab)
        which = rng.permutation(n) % len(prefixes)
        times = np.cumsum(rng.exponential(1 / rate, n))
        arrivals = [
            Arrival(float(at), prefixes[i] + end, 64, "shared")
            for at, i, end in zip(times, which, ends, strict=True)
        ]
        seen = await self.clients.play(self.fleet.urls(a.ingress), self.model, arrivals)
        figures = summary(seen, 0.5, 0.05)
        self.write("routing", **figures, policy="tokens" if tokens else "Ray Serve's default", rate=rate)

    async def flame(self) -> None:
        """Where a Router and a replica spend their time under full load, as flame graphs."""
        Steering().apply()
        pids: dict[str, int] = {}
        for kind, process in processes():
            pids.setdefault(kind, process.pid)
        urls, seconds = self.fleet.urls(self.args.ingress), 6.0
        spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
        self.args.flame.mkdir(parents=True, exist_ok=True)
        async with self.load(self.chats(self.args.replicas[-1]), urls, seconds + 1):
            recording = []
            for kind in ("router", "replica"):
                path = self.args.flame / f"{self.args.name}-{self.shape}-{kind}.svg"
                command = [
                    spy,
                    "record",
                    "-p",
                    str(pids[kind]),
                    "-d",
                    str(int(seconds - 1)),
                    "-r",
                    "100",
                ]
                command += ["--nonblocking", "-o", str(path)]
                recording.append(
                    await asyncio.create_subprocess_exec(
                        *command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                    )
                )
            errors = [(await each.communicate())[1].decode() for each in recording]
        if any(each.returncode for each in recording):
            raise RuntimeError(f"py-spy: {errors}")

    async def kill(self) -> None:
        """One replica dies under half of the full load, so that the others can take over what it had."""
        Steering().apply()
        a = self.args
        replicas = a.replicas[-1]
        victim = (await self.fleet.about())[-1]
        chats = self.chats(replicas, seed=7)
        chats = Chats(chats.streams // 2, chats.prompt, chats.output, chats.vocab, chats.seed)
        before, after = a.seconds / 2, a.seconds * 1.5
        async with self.load(chats, self.fleet.urls(a.ingress), before + after) as (first, last, task):
            await asyncio.sleep(first + before - now())
            died = now()
            os.kill(victim["pid"], signal.SIGKILL)
            gone = lambda: self.fleet.running() < replicas  # noqa: E731
            noticed = await self.until(gone, after)
            await asyncio.sleep(last - now())
        seen = task.result()
        alive = [one for one in seen if one.times and one.times[0] < died < max(one.ended, one.times[-1])]
        stalls = []
        for one in alive:
            late = [b - x for x, b in zip(one.times, one.times[1:], strict=False) if b > died]
            stalls.append(max(late, default=last - one.times[-1]))
        figures: dict[str, Any] = {
            "streams": chats.streams,
            "requests": len(seen),
            "failed": window(seen, first, last)["failed"],
            "alive_at_death": len(alive),
            "before": window(seen, first, died),
            "after": window(seen, died, last),
            **quantiles("stall_ms", stalls),
            "stall_ms_max": max(stalls, default=0.0) * 1e3,
            "noticed_s": None if noticed is None else noticed - died,
        }
        back = await self.until(lambda: self.fleet.running() >= replicas, min(90.0, self.ends - now() - 5))
        self.write("kill", **figures, recovery_s=None if back is None else back - died)

    async def until(self, true: Callable[[], bool], seconds: float) -> float | None:
        """When it became true, asked four times a second; None if it did not in time."""
        deadline = now() + seconds
        while now() < deadline:
            if await asyncio.to_thread(true):
                return now()
            await asyncio.sleep(0.25)
        return None

    async def all(self) -> None:
        a = self.args
        each = RAMP + a.seconds + 2
        most = a.replicas[-1]
        await self.phase("about", 3, self.about)
        if "bare" in a.phases:
            await self.phase("bare", each, self.bare)
        if "http" in a.phases:
            for replicas in a.replicas:
                run = partial(self.http, replicas, a.routers, a.ingress)
                await self.phase(f"http {replicas}", each, run)
        if "ingress" in a.phases and a.ingress == "direct":
            await self.phase("http haproxy", each, partial(self.http, most, a.routers, "haproxy"))
            for routers in {a.routers // 2, a.routers // 4} - {0}:
                run = partial(self.http, most, routers, "direct")
                await self.phase(f"http {most} by {routers} Routers", each, run)
        if "routing" in a.phases and most > 1:
            for tokens in (False, True):
                await self.phase("routing", 2.5 * a.seconds, partial(self.routing, tokens))
        if a.flame:
            await self.phase("flame", RAMP + 10, self.flame)
        if "kill" in a.phases and most > 1:
            await self.phase("kill", RAMP + 2 * a.seconds + 10, self.kill)
