"""The flax.nnx shell: a module that holds one table and rotates with it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import ArrayLike
from jaxtyping import Array, Float32

from jrope._config import RopeConfig
from jrope._gather import OutOfRange, check_out_of_range
from jrope._kinds import TableName
from jrope._ops import check_implementation, device_table
from jrope._shell import RotaryMethods, table_sharding


class RotaryCache(nnx.Variable):
    """The type of the table's variable: no `nnx.Param`, so no optimizer sees it.

    Leave it out of checkpoints with the filter `nnx.Not(RotaryCache)` and call
    `fill_tables` after a restore. Inside `nnx.vmap` over layers keep it unstacked with
    `nnx.StateAxes({RotaryCache: None, ...: 0})`.

    >>> rope = RotaryEmbedding(RopeConfig(head_dim=2, rope_theta=1e4,
    ...     max_position_embeddings=16))
    >>> nnx.state(rope, nnx.Param), nnx.state(rope, RotaryCache)["cos_sin_cache"].shape
    (State({}), (16, 2))
    """


class RotaryEmbedding(RotaryMethods, nnx.Module):
    """Rotary embedding over one static table, shared by all layers of a model.

    Build it outside jit and keep one per distinct config in the model. Each step, look
    this step's rows up once and hand them to every layer; a single layer may call the
    module instead. The length of the context is no shape and no slice bound, so prefill
    chunks, prefix hits and decode steps each run the program compiled once.

    `nnx.jit` copies all state at each call by default, tables included (64 MiB for 128k
    rows of 128 features); `jax.jit` over `nnx.split` state does not, nor does
    `nnx.jit(..., graph=False)`.

    Args:
      config: what to rotate, and how.
      implementation: the name of a route (docs/pages/platforms.md), or None for the
        best that takes the case.
      out_of_range: what positions of P or more read: NaN rows, or the last row
        ("clip").
      table: "flat", one row a position, or "two_level", which holds a million
        positions in about a megabyte at four times the error.

    Raises:
      TypeError, ValueError: if an option is none of its choices, or the config has no
        table of that kind.

    >>> import jax.numpy as jnp
    >>> rope = RotaryEmbedding(RopeConfig(head_dim=2, rope_theta=1e4,
    ...     max_position_embeddings=16))
    >>> query, key = rope(jnp.arange(4), jnp.ones((4, 8, 2)), jnp.ones((4, 1, 2)))
    >>> query.shape, key.shape
    ((4, 8, 2), (4, 1, 2))
    """

    def __init__(
        self,
        config: RopeConfig,
        *,
        implementation: str | None = None,
        out_of_range: OutOfRange = "nan",
        table: TableName = "flat",
    ):
        """Builds the table."""
        check_implementation(implementation)
        check_out_of_range(out_of_range)
        self.config = config
        self.implementation = implementation
        self.out_of_range: OutOfRange = out_of_range
        self.table: TableName = table
        self.cos_sin_cache = RotaryCache(device_table(config, table))

    def rows(
        self, positions: ArrayLike
    ) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
        """This step's rows, for all layers: see `jrope.lookup`."""
        array = self.cos_sin_cache.get_value()
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(
                "the cos/sin table must be filled before use, got only its shape; call "
                "jrope.nnx.fill_tables(model) after eval_shape and the restore"
            )
        return self._look_up(array, positions)


def fill_tables(model: nnx.Module) -> None:
    """Builds the table of every `RotaryEmbedding` in a model, in place.

    For models whose parameters were restored into an abstract model (`nnx.eval_shape`),
    or whose whole state was cast. A table is placed as the one that it replaces.

    Args:
      model: any nnx module.

    Raises:
      ValueError: if a table was stacked by `nnx.vmap`.

    >>> config = RopeConfig(head_dim=2, rope_theta=1e4, max_position_embeddings=16)
    >>> rope = nnx.eval_shape(lambda: RotaryEmbedding(config))  # only shapes
    >>> fill_tables(rope)
    >>> rope.cos_sin_cache[...].shape
    (16, 2)
    """
    made: dict[tuple[RopeConfig, TableName], Array] = {}
    for _, module in nnx.iter_graph(model):
        if not isinstance(module, RotaryEmbedding):
            continue
        key: tuple[RopeConfig, TableName] = module.config, module.table
        held = module.cos_sin_cache.get_value()
        if key not in made:
            made[key] = device_table(*key)
        # Of its own: one buffer in two variables could not be donated.
        table = jnp.array(made[key], copy=True)
        if held.shape != table.shape:
            raise ValueError(
                f"the cos/sin table must have shape {table.shape}, got {held.shape}; "
                f"was it stacked by nnx.vmap? Use "
                f"nnx.StateAxes({{RotaryCache: None, ...: 0}})"
            )
        module.cos_sin_cache.set_value(_placed_as(held, table))


def place_tables(
    model: nnx.Module, mesh: Mesh, *, rows_over: str | None = None
) -> None:
    """Puts the table of every `RotaryEmbedding` in a model on a mesh, in place.

    A table is whole on every device, so that a lookup communicates nothing. Where that
    costs too much memory its rows can be split over an axis of the mesh; a lookup then
    costs a collective over that axis, of this step's rows. `fill_tables` keeps either.

    Args:
      model: any nnx module, with its tables filled.
      mesh: the devices.
      rows_over: the axis to split rows over, or None.

    Raises:
      ValueError: if the mesh has no such axis, or it does not divide a table's rows, or
        a table is not filled; no table has moved then.

    >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    >>> rope = RotaryEmbedding(RopeConfig(head_dim=2, rope_theta=1e4,
    ...     max_position_embeddings=16))
    >>> place_tables(rope, mesh)
    >>> rope.cos_sin_cache[...].sharding.is_fully_replicated
    True
    """
    placed = []
    for _, module in nnx.iter_graph(model):
        if isinstance(module, RotaryEmbedding):
            table = module.cos_sin_cache.get_value()
            if isinstance(table, jax.ShapeDtypeStruct):
                raise ValueError(
                    "tables must hold values, got a shape only; call "
                    "jrope.nnx.fill_tables(model) first"
                )
            sharding = table_sharding(table.shape[0], mesh, rows_over)
            placed.append((module.cos_sin_cache, table, sharding))
    for variable, table, sharding in placed:
        variable.set_value(jax.device_put(table, sharding))


def _placed_as(held: Any, table: Array) -> Array:
    """The table, sharded as the value that it replaces, abstract or not."""
    sharding = getattr(held, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = jax.sharding.get_mesh()
        sharding = None if mesh.empty else NamedSharding(mesh, sharding.spec)
    return table if sharding is None else jax.device_put(table, sharding)
