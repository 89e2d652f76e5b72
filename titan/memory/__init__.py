"""Blocks of KV: the pool, the block tables, the prefix cache, the swap space, and the sizes of them."""
