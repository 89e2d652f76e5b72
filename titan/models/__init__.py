"""Models: one decoder for the Llama family, transformers' own modules for others, and what loads them."""
