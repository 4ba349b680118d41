"""Kernels of ours in Triton: small work of decodes, which else takes several launches each.

What PyTorch and FlashInfer compute without them is the authority. They are compared with it on a GPU
(``tests/gpu``), and on a CPU, where Triton interprets them.
"""
