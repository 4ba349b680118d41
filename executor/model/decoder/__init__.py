"""Decoder that runs every family, and the description that it is built from."""
