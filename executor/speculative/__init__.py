"""Speculative decoding: what a draft model proposes, and what the target model makes of it."""
