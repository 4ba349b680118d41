"""Scheduling of one group: sequences, KV blocks, step plans and their commit."""
