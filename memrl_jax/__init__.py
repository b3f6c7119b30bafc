"""memrl_jax: language-model agents that explore, remember and learn from what they remember."""

__version__ = "0.1.0"
