"""What is measured on a running application of several engines, phase by phase."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
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
from benchmarks.fleet import CpuClock, Fleet, processes
from benchmarks.latency import quantiles, summary, window
from benchmarks.steering import Steering
from benchmarks.targets import Chats, Clients, Seen, now
from deployments.balancer import STALE
from engine.stats import EngineStats

RATES = {"8b": 20.0, "0.6b": 60.0, "demo": 60.0}
"""Requests a second for each replica, in the comparison of policies."""


def write(args: argparse.Namespace, phase: str, shape: str, **figures: Any) -> None:
    """A line of the results, at once."""
    line = {
        "phase": phase,
        "shape": shape,
        "replicas": args.replicas[-1],
        "router_replicas": args.routers,
        "ingress": args.ingress,
        "engine": "GPU" if args.paced is None else f"paced: a step takes {args.paced:g} times an H200's time",
        "pace": args.paced,
        **figures,
        "device": args.device,
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "version": args.version,
    }
    print(json.dumps(line), flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Phases:
    """One start of one shape, and its phases. All that is not through when `ends` comes is left out."""

    def __init__(
        self, args: argparse.Namespace, shape: str, fleet: Fleet, clients: Clients, ends: float
    ) -> None:
        self.args, self.shape, self.fleet, self.clients = args, shape, fleet, clients
        self.ends = ends
        self.model = fleet.settings.model
        self.vocab: int = json.loads((Path(self.model) / "config.json").read_text())["vocab_size"]
        self.rates: dict[str, float] = {}
        """Tokens a second of earlier phases."""
        self._seeds = itertools.count(1)  # prompts of an earlier phase would be found in the cache

    def chats(self, streams: int) -> Chats:
        return Chats(streams, self.args.prompt, self.args.output, self.vocab, next(self._seeds))

    async def phase(self, name: str, seconds: float, run: Callable[[], Awaitable[None]]) -> None:
        """Run it if there is time; what goes wrong in it is told and ends nothing else."""
        if now() + seconds > self.ends:
            print(f"skipped, no time is left: {self.shape} {name}", file=sys.stderr, flush=True)
            return
        begin = now()
        try:
            await asyncio.wait_for(run(), min(2 * seconds + 60, self.ends - begin))
        except Exception as error:
            write(self.args, name, self.shape, error=repr(error)[:2000])
        try:
            await asyncio.wait_for(self.idle(), 15 + STALE)
        except Exception as error:
            print(f"{self.shape} {name}: not idle after it: {error!r}", file=sys.stderr, flush=True)
        print(f"{self.shape} {name}: {now() - begin:.1f} s", file=sys.stderr, flush=True)

    async def idle(self) -> None:
        """Return when no replica that lives computes anything, and Routers know it.

        Of one that is silent they think that it works on as fast as before: a paced one for long.
        """
        while True:
            stats: list[EngineStats] = await self.fleet.ask("stats")
            if not any(each.running or each.waiting for each in stats):
                return await asyncio.sleep(1 if self.args.paced is None else STALE)
            await asyncio.sleep(0.1)

    # Phases

    async def about(self, start_s: float) -> None:
        """What there is: its start, each replica's GPU and cores."""
        each = await self.fleet.about()
        ports = await asyncio.to_thread(self.fleet.urls, "direct") if self.args.ingress != "proxy" else []
        figures = {"start_s": start_s, "each": each, "router_ports": len(ports)}
        write(self.args, "about", self.shape, command=self.args.command, note=self.args.note, **figures)

    async def bare(self, replicas: int) -> None:
        """Engines with nothing around them, in their own processes; several at the same time."""
        a = self.args
        names = [each["replica"] for each in await self.fleet.about()][:replicas]
        chats, begin = self.chats(a.streams * replicas), now() + 0.3
        within = a.ramp + a.seconds + 20
        each = await self.fleet.ask("bare", names, chats, begin, a.ramp, a.seconds, within=within)
        if len(each) < replicas:
            raise RuntimeError(f"{len(each)} of {replicas} replicas answered")
        rate = sum(one["output_tokens_per_s"] for one in each)
        self.rates[f"bare {replicas}"] = rate
        one = self.rates.get("bare 1")
        figures = each[0] | {"output_tokens_per_s": rate, "scaling": rate / one if one else None}
        steps = [one["steps"] for one in each if one["steps"]]
        figures |= {"replicas": replicas, "router_replicas": 0, "ingress": None, "steps": steps}
        write(a, "bare", self.shape, **figures | _worst(steps), streams=chats.streams)

    @asynccontextmanager
    async def load(
        self, chats: Chats, urls: list[str], seconds: float
    ) -> AsyncIterator[tuple[float, float, asyncio.Task[list[Seen]]]]:
        """Open streams; the block runs from when they are up to speed. Gives its first and last second."""
        await self.clients.start()
        begin = now() + 0.3
        first, last = begin + self.args.ramp, begin + self.args.ramp + seconds
        task = asyncio.create_task(self.clients.keep(urls, self.model, chats, begin, last))
        await asyncio.sleep(first - now())
        yield first, last, task
        await task

    async def http(self, replicas: int, routers: int, ingress: str) -> None:
        """As many streams as `replicas` engines have rows, all of them busy."""
        a = self.args
        Steering(replicas=replicas).apply()
        urls = await asyncio.to_thread(self.fleet.urls, ingress)
        if ingress == "direct":
            if len(urls) < routers:
                raise RuntimeError(f"{len(urls)} of {routers} Routers have a port")
            urls = urls[:routers]
        chats = self.chats(a.streams * replicas)
        async with self.load(chats, urls, a.seconds) as (first, last, task):
            clock = CpuClock()
            await asyncio.sleep(max(0.0, last - 1 - now()))
            gpus = await asyncio.to_thread(self._gpu_utilization)
            await asyncio.sleep(last - now())
            cores = clock.cores()
        found = window(task.result(), first, last)
        steps = [each for each in await self.fleet.ask("steps", first, last) if each["requests"] >= 1]
        rate = found["output_tokens_per_s"]
        self.rates[f"{ingress} {replicas}"] = max(rate, self.rates.get(f"{ingress} {replicas}", 0.0))
        one = self.rates.get(f"{ingress} 1")
        bare = self.rates.get(f"bare {replicas}", replicas * self.rates.get("bare 1", 0.0))
        write(
            a,
            "http",
            self.shape,
            **found | {"replicas": replicas, "router_replicas": routers, "ingress": ingress},
            scaling=rate / one if one else None,
            http_cost=1 - rate / bare if bare else None,
            streams=chats.streams,
            # Sent before the window, and without a token when it ended: then not all engines were full.
            stuck=sum(one.due < first and not one.times for one in task.result()),
            cpu=cores,
            cpu_us_per_token={
                kind: round(each["all"] / rate * 1e6, 2) for kind, each in cores.items() if rate
            },
            **_worst(steps),
            steps=steps,
            gpu_utilization=gpus,
        )

    def _gpu_utilization(self) -> list[str]:
        """Of each replica, and of each GPU as Ray sees it: lines of the metrics endpoint."""
        try:
            return self.fleet.metrics("gpu", "utilization")
        except Exception as error:
            return [f"# no metrics: {error!r}"]

    async def routing(self, tokens: bool) -> None:
        """Requests that share prefixes, four to each, placed by what is cached where, or by queues only."""
        a, replicas = self.args, self.args.replicas[-1]
        Steering(tokens=tokens).apply()
        rate = RATES[self.shape] * replicas / (a.paced or 1)
        n = min(512 * replicas, int(rate * a.seconds * 2))
        rng = np.random.default_rng([3, tokens])
        prefixes = random_prompts(rng, [2048] * max(1, n // 4), self.vocab)
        ends = random_prompts(rng, [64] * n, self.vocab)
        which = rng.permutation(n) % len(prefixes)
        times = np.cumsum(rng.exponential(1 / rate, n))
        arrivals = [
            Arrival(float(at), prefixes[i] + end, 64, "shared")
            for at, i, end in zip(times, which, ends, strict=True)
        ]
        urls = await asyncio.to_thread(self.fleet.urls, a.ingress)
        seen = await self.clients.play(urls, self.model, arrivals, grace=20 + a.seconds)
        figures = summary(seen, 0.5, 0.05)
        policy = "tokens" if tokens else "Ray Serve's default"
        write(a, "routing", self.shape, **figures, policy=policy, rate=rate)

    async def flame(self) -> None:
        """Where a Router, a replica and its engine spend their time under full load, as flame graphs."""
        a = self.args
        Steering().apply()
        pids: dict[str, int] = {}
        for kind, process in processes():
            pids.setdefault(kind, process.pid)
        urls, seconds = await asyncio.to_thread(self.fleet.urls, a.ingress), 6
        spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
        a.flame.mkdir(parents=True, exist_ok=True)
        recording = []
        async with self.load(self.chats(a.streams * a.replicas[-1]), urls, seconds + 1):
            for kind in ("router", "replica", "engine"):
                path = a.flame / f"{a.name}-{self.shape}-{kind}.svg"
                options = f"record -p {pids[kind]} -d {seconds - 1} -r 100 --nonblocking -o".split()
                recording.append(
                    await asyncio.create_subprocess_exec(
                        spy, *options, str(path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                    )
                )
            try:
                async with asyncio.timeout(30):
                    errors = [(await each.communicate())[1].decode() for each in recording]
            finally:
                for each in recording:
                    with contextlib.suppress(ProcessLookupError):
                        each.kill()
        if any(each.returncode for each in recording):
            raise RuntimeError(f"py-spy: {errors}")

    async def kill(self) -> None:
        """One replica dies under half of the full load, so that the others can take over what it had."""
        Steering().apply()
        a = self.args
        replicas = a.replicas[-1]
        victim = (await self.fleet.about())[-1]
        chats = self.chats(a.streams * replicas // 2)
        before, after = a.seconds / 2, a.seconds * 2
        urls = await asyncio.to_thread(self.fleet.urls, a.ingress)
        async with self.load(chats, urls, before + after) as (first, last, task):
            await asyncio.sleep(first + before - now())
            died = now()
            os.kill(victim["pid"], signal.SIGKILL)
            patience = min(90.0, self.ends - died - 5)
            recovery = asyncio.create_task(self._recovered(replicas, victim["replica"], patience))
            await asyncio.sleep(last - now())
        seen = task.result()
        alive = [one for one in seen if one.times and one.times[0] < died < max(one.ended, one.times[-1])]
        stalls = []
        for one in alive:
            late = [b - x for x, b in zip(one.times, one.times[1:], strict=False) if b > died]
            stalls.append(max(late, default=last - one.times[-1]))
        back, each = await recovery
        figures = {
            "streams": chats.streams,
            "requests": len(seen),
            "failed": window(seen, first, last)["failed"],
            "alive_at_death": len(alive),
            "before": window(seen, first, died),
            "after": window(seen, died, last),
            **quantiles("stall_ms", stalls),
            "stall_ms_max": max(stalls, default=0.0) * 1e3,
            "recovery_s": None if back is None else back - died,
            "each": each,
        }
        write(a, "kill", self.shape, **figures)

    async def _recovered(
        self, replicas: int, victim: str, seconds: float
    ) -> tuple[float | None, list[dict[str, Any]]]:
        """When as many answer as before, the dead one not counted; None if not in time. What they are."""
        deadline = now() + seconds
        each: list[dict[str, Any]] = []
        while True:
            with contextlib.suppress(Exception):  # the dead one may still be asked
                each = [one for one in await self.fleet.about() if one["replica"] != victim]
            if len(each) >= replicas:
                return now(), each
            if now() > deadline:
                return None, each
            await asyncio.sleep(0.25)

    async def all(self, start_s: float) -> None:
        a = self.args
        each = a.ramp + a.seconds + 2
        most = a.replicas[-1]
        await self.phase("about", 3, partial(self.about, start_s))
        if "bare" in a.phases:
            for replicas in a.bare:
                await self.phase("bare", each, partial(self.bare, replicas))
        if "http" in a.phases:
            for replicas in a.replicas:
                await self.phase("http", each, partial(self.http, replicas, a.routers, a.ingress))
        if "routing" in a.phases and most > 1:
            for tokens in (False, True):
                await self.phase("routing", 2.5 * a.seconds + 3, partial(self.routing, tokens))
        if "ingress" in a.phases and a.ingress == "direct" and self.shape == a.shape[0]:
            await self.phase("http", each, partial(self.http, most, a.routers, "haproxy"))
            for routers in sorted({a.routers // 2, a.routers // 4} - {0}, reverse=True):
                await self.phase("http", each, partial(self.http, most, routers, "direct"))
        if a.flame:
            await self.phase("flame", a.ramp + 10, self.flame)
        if "kill" in a.phases and most > 1:
            await self.phase("kill", a.ramp + 2.5 * a.seconds + 15, self.kill)


def _worst(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several replicas' steps, the figures of the slowest."""
    keys = ("step_ms_p50", "step_ms_p99", "gap_us_p99")
    found = {key: [each[key] for each in steps if each[key] is not None] for key in keys}
    return {key.replace("gap", "step_gap"): max(each, default=None) for key, each in found.items()}
