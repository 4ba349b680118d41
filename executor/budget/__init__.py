"""Token budget: the largest step, and every size that follows from it."""
