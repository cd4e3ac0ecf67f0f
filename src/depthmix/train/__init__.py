"""Training: losses, optimisers, steps and the loop."""
