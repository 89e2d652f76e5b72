"""The models: one decoder for the Llama family, and how its config, tokenizer and weights are read."""
