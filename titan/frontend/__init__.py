"""From prompts to text: requests and outputs, and the loop that steps an engine for the callers of all threads."""
