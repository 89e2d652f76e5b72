"""Blocks of KV: the pool, the block tables, the prefix cache, how many there are."""
