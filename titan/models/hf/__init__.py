"""Models of transformers over Titan's paged KV: their own modules, with attention, experts and linear layers of the back end."""
