"""Blocks of KV: the pool, the block tables, the prefix cache, and the size of the pool."""
