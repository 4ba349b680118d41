"""Benchmarks of this folder, run one after another, each in a process of its own.

    python -m tests.bench [NAME ...]      such as router_step or bench_router_step

Without names, all but peers, which installs other projects. Exits with 1 if one of them misses what
it requires or fails; the others run all the same.
"""

import os
import subprocess
import sys
from pathlib import Path


def main() -> None:
    folder = Path(__file__).parent
    modules = {
        path.stem.removeprefix("bench_"): ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in sorted(folder.rglob("bench_*.py"))
    }
    names = [name.removeprefix("bench_") for name in sys.argv[1:]] or [
        name for name in modules if name != "peers"
    ]
    if unknown := [name for name in names if name not in modules]:
        sys.exit(f"{', '.join(unknown)}: need some of {', '.join(modules)}")
    environment = {"GRPC_VERBOSITY": "ERROR", "THP_MEM_ALLOC_ENABLE": "1", **os.environ}
    failed = []
    for name in names:
        print(f"==== {name}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", f"tests.bench.{modules[name]}"], env=environment
        )
        if done.returncode:
            failed.append(name)
        print(flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
