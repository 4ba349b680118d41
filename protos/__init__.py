"""Contracts between clients, router and executors: the one package that both sides import."""
