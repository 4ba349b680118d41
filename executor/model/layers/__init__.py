"""Layers that models share. A layer gets tensors and a DpLayout, never a request."""
