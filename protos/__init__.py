"""Contracts between clients, router and executors: the one package that both sides import."""

__version__ = "0.2.0"  # of the release, the same for all packages
