"""Transforms of logits before sampling."""
