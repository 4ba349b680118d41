"""Speculative decoding: drafts, their verification, and the state of a draft model."""
