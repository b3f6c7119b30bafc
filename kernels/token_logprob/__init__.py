"""Log-probs of sampled tokens from hidden states, without an array of rows times vocabulary."""

from .ops import token_logprob, token_logprob_split
from .ref import TokenLogprob

__all__ = ["TokenLogprob", "token_logprob", "token_logprob_split"]
