"""From logits to distributions and tokens."""
