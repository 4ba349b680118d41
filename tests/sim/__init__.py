"""The real router against fake executors, on a virtual clock."""
