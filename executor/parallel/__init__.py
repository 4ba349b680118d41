"""Parallel layout of a group: topology, process groups, collectives, epochs."""
