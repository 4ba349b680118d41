"""Service of one executor, as its router calls it."""
