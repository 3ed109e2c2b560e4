"""Several engines on one machine, measured in one go: scaling, what HTTP costs, routing, a death.

    python -m scripts.multi_gpu --out benchmarks/results/h200x2.jsonl
    python -m scripts.multi_gpu --shape 0.6b --ingress proxy --phases bare http --out FILE
    python -m scripts.multi_gpu --paced 20 --streams 32 --replicas 1 2 4 8 16 --out FILE

Starts Ray and the application with as many engines as the largest of --replicas (by default one and as
many as there are GPUs), loads it from processes of its own, and appends a JSON line for every phase as
soon as that is through. Weights are random, but those of `demo`, the demo model. Other numbers of Routers
and HAProxy are measured with the first shape. Shapes share what is left of --limit evenly; a phase that
fails, or for which no time is left, ends no other. --paced N replaces the GPUs by engines that take N times
the time of an H200 for each step, so that all but the GPU is real.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import resource
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.arguments import amount, count, file
from benchmarks.ports import free_port
from benchmarks.targets import Clients, now, undisturbed

CONTEXT = 8192
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # virtual machines that grow as they are used look full
    "RAY_worker_niceness": "0",
    "RAY_metrics_report_interval_ms": "2000",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # Routers end when all has been measured
    # A replica that does not say in time how many requests it has is passed over, and one of several is
    # not what is measured; Ray Serve gives it 0.1 s, which busy cores exceed.
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",
    "HF_HUB_OFFLINE": "1",
}
INGRESS = {
    "proxy": {},
    "haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"},
}
INGRESS["direct"] = INGRESS["haproxy"]  # Routers that can be reached past HAProxy, too
PHASES = ["bare", "http", "routing", "ingress", "kill"]


def settings(args: argparse.Namespace, shape: str, folder: Path) -> Any:
    from benchmarks.workloads import save_config, save_tokenizer
    from deployments.demo_model import resolve
    from deployments.settings import Settings

    if shape == "demo":
        model = resolve(shape)
    else:
        model = save_config(shape, folder / shape, CONTEXT)
        save_tokenizer(shape, folder / shape)
    engine: dict[str, Any] = {
        "load_format": "safetensors" if shape == "demo" else "random",
        "context_length": CONTEXT,
        "max_running_requests": args.streams,
        "max_tokens_per_step": args.max_tokens_per_step,
        "dtype": "bfloat16",
    }
    return Settings(
        model=model,
        accelerator="gpu" if args.paced is None else "cpu",
        replicas=args.replicas[-1],
        routers=args.routers,
        engine=engine,
    )


def gpus() -> tuple[int, str]:
    import pynvml  # torch would take memory on a GPU

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0, ""
    n = pynvml.nvmlDeviceGetCount()
    return n, f"{n} x {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=["8b", "0.6b", "demo"], help="all by default")
    parser.add_argument("--replicas", type=count, nargs="+", help="one and all GPUs by default")
    parser.add_argument("--routers", type=count, help="four for each replica by default")
    parser.add_argument("--ingress", choices=INGRESS, default="direct")
    parser.add_argument("--streams", type=count, default=256, help="for each replica")
    parser.add_argument("--prompt", type=count, default=128)
    parser.add_argument("--output", type=count, default=256)
    parser.add_argument("--ramp", type=float, default=2.0, help="seconds of load before a measurement")
    parser.add_argument("--seconds", type=amount, default=3.0, help="of each measurement")
    parser.add_argument("--max-tokens-per-step", type=count, default=2048)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--clients", type=count, help="processes; a quarter of the cores by default")
    parser.add_argument("--paced", type=amount, help="no GPU, so many times an H200's time")
    parser.add_argument("--flame", type=Path, help="folder for flame graphs (py-spy, as root)")
    parser.add_argument("--logs", type=Path, help="copy Ray's logs here at the end")
    parser.add_argument("--limit", type=amount, default=560, help="seconds for everything")
    parser.add_argument("--version", default="", help="what this state of the code is called in the results")
    parser.add_argument("--note", default="", help="goes into the results")
    parser.add_argument("--out", type=file, help="append the JSON lines to this file")
    args = parser.parse_args()
    found, args.device = gpus() if args.paced is None else (0, "CPUs")
    if args.paced is None and not found:
        parser.error("there is no GPU; --paced N needs none")
    if args.paced is not None and "demo" in (args.shape or []):
        parser.error("no time of a step is known for demo: it needs a GPU")
    args.shape = args.shape or ["8b", "0.6b", *(["demo"] if args.paced is None else [])]
    args.replicas = sorted(set(args.replicas or [1, max(found, 1)]))
    args.bare = sorted({1, args.replicas[-1]}) if args.paced is None else [1]
    args.routers = args.routers or 4 * args.replicas[-1]
    args.name = args.out.stem if args.out else "multi-gpu"
    args.command = shlex.join(["python", "-m", "scripts.multi_gpu", *sys.argv[1:]])
    return args


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    args = parsed()
    ends = now() + args.limit
    faulthandler.dump_traceback_later(args.limit + 25, exit=True)  # what hangs must not keep the machine
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # every stream is a connection
    cores, most = os.cpu_count() or 1, args.replicas[-1]

    folder = Path(tempfile.mkdtemp(prefix="sa"))
    os.environ |= ENVIRONMENT | INGRESS[args.ingress] | {"STEPAHEAD_FLEET_CONTROL": str(folder / "steering")}
    for what in ("METRICS", "STATS"):  # HAProxy's own are fixed, and one may be left of a run that was killed
        os.environ[f"RAY_SERVE_HAPROXY_{what}_PORT"] = str(free_port())
    if args.paced is not None:
        os.environ["STEPAHEAD_FLEET_PACE"] = str(args.paced)
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    import ray
    from ray import serve

    from benchmarks.fleet import Fleet, in_time  # reads the environment
    from benchmarks.phases import Phases, write

    try:
        begin = time.perf_counter()
        ray.init(
            num_cpus=max(cores, 2 * most + args.routers),
            num_gpus=most if args.paced is None else 0,
            include_dashboard=False,
            object_store_memory=1 << 29,
            _temp_dir=str(folder / "ray"),
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
        tell(f"Ray: {time.perf_counter() - begin:.1f} s")
        with Clients(args.clients or max(1, cores // 4)) as processes:
            port = free_port()  # Ray Serve keeps it from shape to shape
            for i, shape in enumerate(args.shape):
                begin = now()
                its_end = begin + (ends - begin) / (len(args.shape) - i)
                fleet = None
                try:
                    fleet = Fleet(settings(args, shape, folder), port, its_end - begin)
                    tell(f"{shape} up: {now() - begin:.1f} s")
                    with undisturbed():
                        asyncio.run(Phases(args, shape, fleet, processes, its_end).all(now() - begin))
                except Exception as error:
                    write(args, "about" if fleet else "start", shape, error=repr(error)[:4000])
                if shape != args.shape[-1]:
                    begin = now()
                    in_time(lambda: serve.delete("fleet"), 60)
                    tell(f"{shape} down: {now() - begin:.1f} s")
    finally:
        if args.logs:
            try:
                shutil.copytree(folder / "ray" / "session_latest" / "logs", args.logs, dirs_exist_ok=True)
            except OSError as error:
                tell(f"logs: {error}")
        in_time(serve.shutdown, 30)
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
