"""Evaluation of trained models on texts and tasks."""
