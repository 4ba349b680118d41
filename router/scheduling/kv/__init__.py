"""KV blocks of a group: which are free, what cached ones hold, and which row has which."""
