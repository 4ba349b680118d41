"""Executors as the router sees them: discovery, forming a group, steps on the wire."""
