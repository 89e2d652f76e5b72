"""What crosses between the parts of the engine: requests, options, trees, steps, outputs. Imports nothing else of Titan."""
