"""How a forward pass is recorded and replayed: its input buffers, its sizes and its backend.

What is recorded is the runners' business; nothing here knows a phase or a model.
"""
