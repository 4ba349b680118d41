"""Hostile clients and hostile executors, with an honest client beside each (``make attack``)."""
