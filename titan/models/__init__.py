"""Models: one decoder for the Llama family, and the loading of its config, tokenizer and weights."""
