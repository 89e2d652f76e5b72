"""Data shared by the parts of the engine: requests, options, trees, steps, outputs. Imports nothing else from Titan."""
