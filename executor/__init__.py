"""Executor: runs the forward passes that the router plans. Tensors, no policy."""
