"""The flax.linen shell: a module whose table lies in the collection `rope_cache`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Float32

from jrope._config import RopeConfig
from jrope._gather import OutOfRange, check_out_of_range
from jrope._kinds import TableName
from jrope._ops import check_implementation, device_table
from jrope._shell import RotaryMethods, table_sharding

COLLECTION = "rope_cache"
_NAME = "cos_sin_cache"


class RotaryEmbedding(RotaryMethods, nn.Module):
    """Rotary embedding over one static table, shared by all layers of a model.

    The table is a variable of the collection `rope_cache`, never of `params`: `init`
    makes it, checkpoints of `variables["params"]` do not hold it, and after a restore
    it comes back from `rope_variables`. Under `nn.scan` use
    `variable_broadcast="rope_cache"`.

    Attributes:
      config: what to rotate, and how.
      implementation: the name of a route (docs/pages/platforms.md), or None for the
        best that takes the case.
      out_of_range: what positions of P or more read: NaN rows, or the last row
        ("clip").
      table: "flat", one row a position, or "two_level", which holds a million
        positions in about a megabyte at four times the error.

    >>> import jax
    >>> config = RopeConfig(head_dim=2, rope_theta=1e4, max_position_embeddings=16)
    >>> rope, heads = RotaryEmbedding(config), jnp.ones((4, 8, 2))
    >>> variables = rope.init(jax.random.key(0), jnp.arange(4), heads, None)
    >>> query, _ = rope.apply(variables, jnp.arange(4), heads, None)
    >>> query.shape, list(variables)
    ((4, 8, 2), ['rope_cache'])
    """

    config: RopeConfig
    implementation: str | None = None
    out_of_range: OutOfRange = "nan"
    table: TableName = "flat"

    def setup(self) -> None:
        """Finds the table, or builds it while the model is being initialised.

        Raises:
          ValueError: if `apply` was given variables without the table.
        """
        check_implementation(self.implementation)
        check_out_of_range(self.out_of_range)
        if not self.is_initializing() and not self.has_variable(COLLECTION, _NAME):
            raise ValueError(
                f"the collection {COLLECTION!r} must hold this module's table at "
                f"{'/'.join((*self.path, _NAME))}, got none; put "
                f"jrope.linen.rope_variables(config) there after restoring params"
            )
        self.cos_sin_cache = self.variable(
            COLLECTION, _NAME, lambda: device_table(self.config, self.table)
        )

    def rows(
        self, positions: ArrayLike
    ) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
        """This step's rows, for all layers: see `jrope.lookup`."""
        # nn.scan hands variables that do not vary over as host arrays while it
        # initialises.
        array = jnp.asarray(self.cos_sin_cache.value)
        return self._look_up(array, positions)


def rope_variables(
    config: RopeConfig,
    *,
    table: TableName = "flat",
    mesh: Mesh | None = None,
    rows_over: str | None = None,
) -> dict[str, Array]:
    """The variables of one `RotaryEmbedding`, to put beside restored params.

    For a model that holds it as `self.rope`:
    `variables = {"params": params, "rope_cache": {"rope": rope_variables(config)}}`.

    Args:
      config: the module's config.
      table: the module's table kind.
      mesh: devices that hold the table, whole on each of them; None is the default
        device.
      rows_over: an axis of the mesh to split the rows over instead. A lookup then costs
        a collective over that axis, of this step's rows.

    Returns:
      `{"cos_sin_cache": array}`, float32, [P, R] for the flat kind.

    Raises:
      TypeError: if it is no config.
      ValueError: if it is no table kind, or the mesh has no such axis, or it does not
        divide the rows.

    >>> config = RopeConfig(head_dim=2, rope_theta=1e4, max_position_embeddings=16)
    >>> rope_variables(config)["cos_sin_cache"].shape
    (16, 2)
    """
    array = device_table(config, table)
    if mesh is not None:
        sharding = table_sharding(array.shape[0], mesh, rows_over)
        array = jax.device_put(array, sharding)
    elif rows_over is not None:
        raise ValueError(f"rows_over={rows_over!r} must come with a mesh, got none")
    return {_NAME: array}
