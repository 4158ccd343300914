"""The least simulated peak of a training step with at most one more forward pass."""
