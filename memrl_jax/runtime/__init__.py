"""MemRL as a component of a deployment: a memory in a folder, and a service in front of any model.

  from memrl_jax import runtime

  with runtime.open("folder") as memory:
    found = memory.suggest("put a clean apple in the fridge")
    memory.feedback(found.id, 1.0, "what was done")

python -m memrl_jax.runtime serve FOLDER --upstream http://127.0.0.1:8000
"""

from memrl_jax.runtime.config import RuntimeConfig, ServiceConfig
from memrl_jax.runtime.memory import Memory, Refused, Suggestions, Told, Unknown
from memrl_jax.runtime.memory import open_memory as open

__all__ = [
  "Memory",
  "Refused",
  "RuntimeConfig",
  "ServiceConfig",
  "Suggestions",
  "Told",
  "Unknown",
  "open",
]
