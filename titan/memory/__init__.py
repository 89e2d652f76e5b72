"""KV blocks: the pool, block tables, the prefix cache, the swap space, and how many blocks there are."""
