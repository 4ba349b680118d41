"""GPU suite: every kernel against PyTorch, graphs against eager runs, and measurements.

    make gpu                       checks and measurements; without a GPU everything is skipped
    python -m tests.gpu.bench_gpu  measurements alone

RESULTS.md says what has been run, and on what.
"""
