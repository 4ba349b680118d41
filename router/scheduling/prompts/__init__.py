"""Prompts of a step: their order, the ranks that they are bound to, and how much of them runs."""
