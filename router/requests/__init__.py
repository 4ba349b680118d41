"""Requests while they wait and run: their data, their listeners, the waiting queue."""
