"""GPU suite: kernels against PyTorch, graphs against eager runs, whole executors, measurements. See README.md."""
