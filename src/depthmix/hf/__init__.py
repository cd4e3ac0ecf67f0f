"""Hugging Face: dense checkpoints as they are on disk, and models as `transformers` knows them."""
