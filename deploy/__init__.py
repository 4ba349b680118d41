"""Everything that starts Lockstep somewhere: images, manifests, the launcher and the demo model."""
