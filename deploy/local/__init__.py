"""Lockstep on one machine: launcher, demo, and the processes they start."""
