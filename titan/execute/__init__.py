"""Running models: batches, the growth of draft trees, memory profiles."""
