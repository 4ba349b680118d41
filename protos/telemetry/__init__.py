"""Logs and metrics of both services."""
