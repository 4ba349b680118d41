"""Releases: what is new, and what is published of a checkout."""
