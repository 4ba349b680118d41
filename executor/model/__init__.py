"""Models: weights, families, layers, experts, sampling, and FlashInfer's kernels."""
