"""From prompts to sampled tokens: the sampling maths, the engine, and the border between text and tokens."""
