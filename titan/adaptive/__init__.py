"""What steps cost, as measured, and what follows from it: how many nodes each request drafts, and how many prompt tokens join."""
