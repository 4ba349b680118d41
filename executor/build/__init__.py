"""Construction of an executor: from settings and checkpoints to objects."""
