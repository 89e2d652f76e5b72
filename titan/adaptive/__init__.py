"""Adaptive speculation: how many nodes each request drafts in each step, from measured costs and acceptance."""
