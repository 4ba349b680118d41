"""Captured graphs: their input buffers, and the backends that record and replay them.

Nothing here knows a runner, a batch or a model.
"""
