"""`stepahead`, also `python -m deployments`: looks at an engine on this machine. It needs no Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from engine.config import EngineConfig
from engine.drawing import Panel, svg, terminal
from engine.engine import AsyncEngine
from engine.overlap import overlap_report, trace_events
from engine.request import Request, SamplingParams
from engine.timeline import Recording, Timeline

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

WARM_UP = 8
"""Tokens of each request that are generated before anything is recorded."""


@app.callback()
def _commands() -> None:
    """Makes `timeline` a command with a name, though it is the only one."""


@app.command()
def timeline(
    model: Annotated[str, typer.Option(help="demo, a Hugging Face id, or a directory.")] = "demo",
    shape: Annotated[
        str | None, typer.Option(help="In place of a model: 8b, 0.6b or tiny with random weights.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    steps: Annotated[int, typer.Option(min=8, max=2048, help="Decode steps to record.")] = 200,
    draw: Annotated[Path | None, typer.Option("--svg", help="Write the picture here.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev here: both runs, a track a lane.")
    ] = None,
    profile: Annotated[
        int, typer.Option(min=0, help="Also let torch.profiler record this many steps, with overlap on.")
    ] = 0,
    profile_out: Annotated[Path, typer.Option(help="Where its trace goes.")] = Path("profile.json"),
    nvtx: Annotated[bool, typer.Option(help="Mark the phases for Nsight Systems.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON in the last line.")] = False,
) -> None:
    """Draw what CPU and GPU do in the same time, without overlap and with it, from the engine's own clock."""
    for path in (draw, trace, profile_out):
        if path and not path.parent.is_dir():  # said before the measurement, and not after it
            raise typer.BadParameter(f"there is no folder {path.parent}")
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=_shape(shape, Path(folder), prompt + steps + 2 * WARM_UP) if shape else _resolve(model),
            load_format="random" if shape else "safetensors",
            max_running_requests=requests,
            max_tokens_per_step=max(8192 if torch.cuda.is_available() else 512, requests),
            nvtx=nvtx,
        )
        panels, events = [], []
        for pid, overlap in enumerate((False, True), 1):
            recording = asyncio.run(_record(config.model_copy(update={"overlap": overlap}), prompt, steps))
            name = f"overlap {'on' if overlap else 'off'}"
            panels.append(Panel(name, recording, overlap_report(recording)))
            events += trace_events(recording, name, pid)
            _release()
        if profile:
            asyncio.run(_record(config, prompt, profile, profile_out))
            typer.echo(f"{profile_out}: {profile} steps by torch.profiler")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    typer.echo(terminal(panels))
    if draw:
        what = shape or model
        draw.write_text(svg(panels, f"{what}, {requests} requests of {prompt} tokens, on {device}"))
        typer.echo(f"{draw}: the picture")
    if trace:
        trace.write_text(json.dumps({"traceEvents": events}))
        typer.echo(f"{trace}: open it in ui.perfetto.dev")
    if as_json:
        typer.echo(json.dumps({panel.title: dataclasses.asdict(panel.report) for panel in panels}))


def _resolve(model: str) -> str:
    from deployments import demo_model

    try:
        return demo_model.resolve(model)
    except demo_model.ModelNotFoundError as error:
        raise typer.BadParameter(str(error)) from error


def _shape(name: str, folder: Path, context: int) -> str:
    sys.path.append(str(Path.cwd()))  # where a checkout is, if this is one: no part of what is installed
    try:
        from benchmarks.workloads import SHAPES, save_config, why_not
    except ImportError as error:
        raise typer.BadParameter(
            "shapes come with a checkout: run it in one", param_hint="--shape"
        ) from error
    if name not in SHAPES:
        raise typer.BadParameter(f"one of {', '.join(SHAPES)}", param_hint="--shape")
    if why := why_not([name]):
        raise typer.BadParameter(why, param_hint="--shape")
    return save_config(name, folder, context)


async def _record(config: EngineConfig, prompt: int, steps: int, profile: Path | None = None) -> Recording:
    """The last `steps` steps of a run in which all requests decode; each has a prompt of its own."""
    engine = AsyncEngine(config)
    if profile:
        engine.timeline = Timeline(annotate=torch.profiler.record_function)
    await engine.start()
    rng = random.Random(0)
    prompts = [rng.choices(range(1, engine.vocab_size), k=prompt) for _ in range(config.max_running_requests)]

    async def generate(run: str, tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        waiting = [
            asyncio.create_task(_drain(engine, Request(f"{run}{i}", p, sampling)))
            for i, p in enumerate(prompts)
        ]
        await asyncio.gather(*waiting)

    await generate("warm-up ", WARM_UP)
    if profile:
        await _profiled(engine, generate("profiled ", steps), profile)
    else:
        # A prompt's last block is never found in the cache, so each is at least partly computed again.
        await generate("", steps + WARM_UP)
    await engine.stop()
    return engine.timeline.recent(steps)


async def _drain(engine: AsyncEngine, request: Request) -> None:
    async for _ in engine.generate(request):
        pass


async def _profiled(engine: AsyncEngine, work: Any, path: Path) -> None:
    """From the engine's own thread, which is the one whose calls torch.profiler records."""
    profiler = torch.profiler.profile()
    await engine.turn(profiler.start)
    await work
    await engine.turn(profiler.stop)
    profiler.export_chrome_trace(str(path))


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    app()
