"""Draft models for speculation, from checkpoints of their own or of their target."""
