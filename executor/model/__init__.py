"""Models: weights, families, the decoder, drafts, layers, experts, sampling, and FlashInfer's kernels."""
