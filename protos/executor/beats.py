"""Interval of beats, with which a router and its executors tell one another that they are alive."""

BEAT_S = 0.1
