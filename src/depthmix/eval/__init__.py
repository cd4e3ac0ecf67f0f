"""Looking at trained models: what they do with a text."""
