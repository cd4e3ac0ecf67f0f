"""Training: losses, optimisers, and steps over a finished model."""
