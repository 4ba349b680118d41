"""Tensors, no policy: runs the forward passes that the router plans."""
