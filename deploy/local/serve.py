"""Local service, left running until Ctrl-C: ``python -m deploy.local.serve``.

An executor that dies is started again; what it ran goes on.
"""

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from deploy.local import flags
from deploy.local.launch import LocalStack, metrics_args
from deploy.local.processes import ProcessEnded, cancel_at_signals

HOW_TO_CALL = """\
Lockstep serves {model} at {address} on {executors}. Logs: {log_dir}

What it is doing: {python} -m router.top {address}{in_browser}

With grpcurl:

  grpcurl -plaintext {address} list
  grpcurl -plaintext -d '{{"text": "\\n17+25=", "stop": {{"max_tokens": 16}}}}' \\
      {address} lockstep.serving.v1.GenerationService/Generate
  grpcurl -plaintext -d '{{"service": "readiness"}}' {address} grpc.health.v1.Health/Check

From Python ({python}):

  import asyncio
  from router.client import Client

  async def main():
      async with Client("{address}") as client:
          async for delta in client.generate("\\n17+25=", max_tokens=16):
              print(delta.text, end="", flush=True)

  asyncio.run(main())

Ctrl-C stops it.
"""


async def serve(args: argparse.Namespace) -> None:
    """Serves until cancelled, or until the router ends by itself."""
    cancel_at_signals()
    print(f"Starting {flags.describe(args)} and a router ...", flush=True)
    stack = LocalStack(
        args.model,
        **flags.group_args(args),
        executor_args=flags.executor_args(args),
        router_args=metrics_args(),
        listen=args.listen,
        log_dir=args.log_dir,
    )
    async with stack:
        page = await stack.status_page()
        print(
            HOW_TO_CALL.format(
                model=args.model.resolve().name,
                address=stack.address,
                executors=flags.describe(args),
                log_dir=stack.log_dir,
                python=sys.executable.removeprefix(f"{Path.cwd()}/"),
                in_browser=f"\nor in a browser:  {page}" if page else "",
            ),
            flush=True,
        )
        stack.on_restart = partial(print, flush=True)
        await stack.supervise()


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Serves a model on this machine until Ctrl-C.")
    parser.add_argument(
        "--listen", default="127.0.0.1:50051", help="router's host:port [default: 127.0.0.1:50051]"
    )
    flags.add_flags(parser)
    args = parser.parse_args()
    try:
        asyncio.run(serve(args))
    except (ProcessEnded, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nStopped.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
