"""Step requests as batches: columns read and checked, staged to the device, KV rows."""
