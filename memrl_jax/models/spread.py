"""How a pass through the layers is spread over a mesh, said where the compiler would not find it.

Left to itself GSPMD brings all tokens of the batch to every chip, more the more data shards there are,
wherever an index could reach those of another chip (the embedding, the sampled tokens), and at those matmuls
of a layer that it would rather split along the weights. Said here:

    lookup    a chip reads its words and its columns of the table for its fsdp group; rows are exchanged
    by_rows   a function of sequences of which each chip has its own
    layer     weights are whole over fsdp while a layer reads them (Rajbhandari et al. 1910.02054, stage 3)
              and cut over tensor (Shoeybi et al. 1909.08053), as is what the layer makes of its own tokens

Letters: N tokens, V vocabulary, D width, K key-value heads, M MLP width. Axes: `training.mesh`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS, FSDP, TENSOR = ("data", "fsdp"), "fsdp", "tensor"


@dataclasses.dataclass(frozen=True)
class Spread:
  """Of a batch whose leading axis is split over ROWS, and weights that lie where `place` says, a function of
  a weight's path and of its shape.

  sequence: between matmuls tokens are split over tensor too (Korthikanti et al. 2205.05198).
  """

  mesh: Mesh
  place: Callable[[Any, Any], NamedSharding]
  sequence: bool = False

  def rows(self, x_ND: jax.Array) -> jax.Array:
    """What a matmul reads of the stream: each chip all tokens of its own sequences."""
    return _gathered(x_ND, NamedSharding(self.mesh, PartitionSpec(ROWS)), self._stream)

  def cut(self, x: jax.Array, axis: int) -> jax.Array:
    """What a matmul makes of `rows`: all tokens of the own sequences, cut over tensor along `axis` (K or M)."""
    whole = x.shape[axis] % self.mesh.shape[TENSOR]
    spec = PartitionSpec(ROWS, *(None,) * (axis - 1), None if whole else TENSOR)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def between(self, x_ND: jax.Array) -> jax.Array:
    """The stream, as it lies between matmuls."""
    return jax.lax.with_sharding_constraint(x_ND, self._stream)

  @property
  def _stream(self) -> NamedSharding:
    return NamedSharding(self.mesh, PartitionSpec((*ROWS, TENSOR) if self.sequence else ROWS))

  def by_rows(self, function: Callable) -> Callable:
    """`function` of each chip's own sequences; all that it takes and gives leads with them."""
    own = PartitionSpec(ROWS)
    return jax.shard_map(function, mesh=self.mesh, in_specs=own, out_specs=own)

  def layer(self, weights: dict[str, Any]) -> dict[str, Any]:
    """The matrices of one layer gathered, but over tensor. Adapters stay as they are: they are small."""

    def gathered(path, leaf):
      if any(getattr(key, "name", "") in ("a", "b") for key in path):
        return leaf
      spec = self.place(path, jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)).spec[1:]
      if not any(spec):
        return leaf
      whole = (TENSOR if axis and TENSOR in axis else None for axis in spec)  # a name or several
      where = (NamedSharding(self.mesh, PartitionSpec(*axes)) for axes in (whole, spec))
      return _gathered(leaf, *where)

    return jax.tree_util.tree_map_with_path(gathered, weights)

  def lookup(self, table_VD: Any, token_N: jax.Array, V: int, D: int) -> jax.Array:
    """table_VD[token_N], the same numbers: all but one of the summands over tensor are zero."""
    tensor, fsdp = self.mesh.shape[TENSOR], self.mesh.shape[FSDP]
    words = TENSOR if tensor > 1 and V % tensor == 0 else None
    columns = FSDP if fsdp > 1 and D % fsdp == 0 else None

    def local(table_VD, token_N):
      if columns:
        token_N = jax.lax.all_gather(token_N, FSDP, tiled=True)
      if words:
        token_N = token_N - jax.lax.axis_index(TENSOR) * (V // tensor)
        mine_N = (token_N >= 0) & (token_N < V // tensor)
        x_ND = jnp.where(mine_N[:, None], table_VD[jnp.where(mine_N, token_N, 0)], 0)
      else:
        x_ND = table_VD[token_N]
      if columns:  # of all the group's tokens, to all columns of the chip's own
        x_ND = jax.lax.all_to_all(x_ND, FSDP, split_axis=0, concat_axis=1, tiled=True)
      return jax.lax.psum(x_ND, TENSOR) if words else x_ND

    specs = PartitionSpec(words, columns), PartitionSpec(ROWS)
    split = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(ROWS))
    return split(table_VD, token_N)


def _gathered(x: jax.Array, whole: NamedSharding, split: NamedSharding) -> jax.Array:
  """x as `whole`; its gradient as `split`, a scattered sum over chips.

  First as `whole` too: told only how the sum is to lie, GSPMD would bring the summands of all chips there.
  """
  place = jax.lax.with_sharding_constraint
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return place(x, whole)

  @jax.custom_vjp
  def gather(x):
    return place(x, whole)

  gather.defvjp(
    lambda x: (place(x, whole), None),
    lambda _, ct: (place(place(ct, whole), split),),
  )
  return gather(x)
