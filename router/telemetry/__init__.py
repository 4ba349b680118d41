"""Metrics, traces and the request log of a router."""
