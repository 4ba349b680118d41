"""Demo model: a small Qwen3-MoE checkpoint."""
