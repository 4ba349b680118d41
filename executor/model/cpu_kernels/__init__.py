"""Kernels for bfloat16 on the CPU: C++ in ``src``, and what builds, loads and calls it."""
