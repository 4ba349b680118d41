"""Engines: the step loop of each group, and all groups of one router."""
