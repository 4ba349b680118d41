"""Period of decode steps over the device's own time, with a router in front that has two in flight.

The engine of a router drives an executor process over loopback. The device's time of a step is that of
its graph; all else (inputs, sampling, waiting for the host) makes the period longer.
"""

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy.local.processes import Process
from tests.bench.router.bench_step_transport import drain
from tests.bench.support.routing import running_engines
from tests.gpu.support.machine import Machine
from tests.gpu.support.production import PRODUCTION
from tests.gpu.support.results import Table
from tests.gpu.support.shapes import PERIOD_LAYERS, PERIOD_SHAPE, PERIODS
from tests.router.support.requests import make_request
from tests.support.paths import DEMO_MODEL

PERIOD = ("Period", ("sequences", "period / compute", "period ms", "compute ms", "layers"))
DEPTH, PROMPT_TOKENS, NUM_STEPS = 2, 8, 200
STOP_TIMEOUT_S = 30.0


def measure_period(machine: Machine) -> list[Table]:
    """Times steps at several numbers of sequences, each with an executor of its own."""
    rows = {}
    with TemporaryDirectory() as folder:
        config = json.loads((DEMO_MODEL / "config.json").read_text()) | PERIOD_SHAPE
        config["num_hidden_layers"] = PERIOD_LAYERS
        Path(folder, "config.json").write_text(json.dumps(config))
        for size in PERIODS:
            times = asyncio.run(_times(machine, Path(folder), size))
            period, compute = times["period"], times["compute"]
            ratio = f"{period / compute:.3f}"
            rows[str(size)] = (ratio, f"{period:.3f}", f"{compute:.3f}", str(PERIOD_LAYERS))
    return [Table(*PERIOD, rows)]


async def _times(machine: Machine, model: Path, num_sequences: int) -> dict[str, Any]:
    settings: dict[str, object] = {
        **PRODUCTION,
        "model": model,
        "listen": "127.0.0.1:0",
        "device": machine.device.type,
        "dtype": "bfloat16",
        "max_num_seqs": num_sequences,
        "max_num_batched_tokens": num_sequences * PROMPT_TOKENS,
        "max_model_len": 1024,
        "num_kv_blocks": 1 + num_sequences * (1024 // 16),
        "decode_graph_sizes": num_sequences,
        "prefill_graphs": "off",
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    args = ["-m", "tests.gpu.figures.timed_executor", *flags]
    process = Process("executor", args, log_path=model / "executor.log", env={})
    try:
        address = (await process.event("listening"))["address"]
        await process.event("ready_to_join")
        async with running_engines(address, DEPTH) as engines:
            listener = engines.listeners.open()
            for number in range(num_sequences):
                fields = {"request_id": f"r{number}", "tag": number, "is_columnar": True}
                prompt = [1 + number] * PROMPT_TOKENS
                engines.submit(
                    make_request(prompt, listener, NUM_STEPS, min_tokens=NUM_STEPS, **fields)
                )
            await drain(engines, listener)
    finally:
        await process.stop(STOP_TIMEOUT_S)
    return await process.event("timed")
