"""The decoder's equations in NumPy, one token and one head at a time, for tests to compare with."""

import math

import numpy as np


def norm(cfg, x, weight):
  """x / rms(x) * w."""
  return x / np.sqrt(np.mean(x * x) + cfg.norm_eps) * (weight + cfg.norm_offset)


def rotate(cfg, x, position, local):
  """Complex form of rotary embedding: pair (x_i, x_{i + d/2}) times exp(i position theta_i)."""
  d = cfg.head_dim
  theta = cfg.local_rope_theta if local and cfg.local_rope_theta else cfg.rope_theta
  pair = x[: d // 2] + 1j * x[d // 2 :]
  turned = pair * np.exp(1j * position * theta ** (-2 * np.arange(d // 2) / d))
  return np.concatenate([turned.real, turned.imag])


def act(cfg, x):
  """SiLU, or GELU with the tanh approximation."""
  if cfg.activation == "silu":
    return x / (1 + np.exp(-x))
  return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(cfg, params, tokens):
  """Float64 logits [T, V] of one sequence."""
  stream = [np.float64(params["embedding"][token]) * cfg.embed_scale for token in tokens]
  for index in range(cfg.layers):
    layer = {
      name: np.float64(leaf["weight"][index] if isinstance(leaf, dict) else leaf[index])
      for name, leaf in params["layers"].items()
    }
    stream = _layer(cfg, layer, stream, cfg.local_layers[index])
  table = np.float64(params["embedding"] if cfg.tie_embeddings else params["head"])
  final = [norm(cfg, x, np.float64(params["final_norm"]["weight"])) @ table.T for x in stream]
  cap = cfg.final_soft_cap
  return np.array(final) if cap is None else cap * np.tanh(np.array(final) / cap)


def _layer(cfg, layer, stream, local):
  G = cfg.groups
  mixed = []  # per token: [K, G + 2, d]
  for position, x in enumerate(stream):
    now = np.einsum("d,dkgh->kgh", norm(cfg, x, layer["attention_norm"]), layer["qkv"])
    if cfg.qkv_bias:
      now = now + layer["qkv_bias"]
    for k in range(cfg.kv_heads):
      for g in range(G + 1):
        if cfg.qk_norm:
          now[k, g] = norm(cfg, now[k, g], layer["query_norm" if g < G else "key_norm"])
        now[k, g] = rotate(cfg, now[k, g], position, local)
    mixed.append(now)
  after = []
  for t, x in enumerate(stream):
    first = max(0, t - cfg.sliding_window + 1) if local else 0
    out = 0.0
    for k in range(cfg.kv_heads):
      for g in range(G):
        score = np.array([mixed[t][k, g] @ mixed[s][k, G] for s in range(first, t + 1)])
        score = score * cfg.attention_scale
        if cfg.attention_soft_cap is not None:
          score = cfg.attention_soft_cap * np.tanh(score / cfg.attention_soft_cap)
        prob = np.exp(score - score.max())
        prob = prob / prob.sum()
        value = sum(p * mixed[s][k, G + 1] for p, s in zip(prob, range(first, t + 1), strict=True))
        out = out + value @ layer["out"][k, g]
    x = x + (norm(cfg, out, layer["post_attention_norm"]) if cfg.post_norms else out)
    gate, up = np.einsum("d,dcm->cm", norm(cfg, x, layer["mlp_norm"]), layer["gate_up"])
    out = (act(cfg, gate) * up) @ layer["down"]
    after.append(x + (norm(cfg, out, layer["post_mlp_norm"]) if cfg.post_norms else out))
  return after
