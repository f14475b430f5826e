"""What the Flax shells share: everything but where the table is kept."""

from typing import TypeVar, overload

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int32

from jrope._config import RopeConfig
from jrope._fractional import check_frequencies
from jrope._gather import OutOfRange
from jrope._hf import config_from_hf
from jrope._kinds import TableName, wrap_table
from jrope._ops import rotate
from jrope._rotate import lookup

_Shell = TypeVar("_Shell", bound="RotaryMethods")


class RotaryMethods:
    """Methods over a config and `rows`; a shell brings the table and the framework."""

    config: RopeConfig
    implementation: str | None
    out_of_range: OutOfRange
    table: TableName

    @classmethod
    def from_hf(
        cls: type[_Shell],
        hf_config: object,
        *,
        layer_type: str | None = None,
        max_position_embeddings: int | None = None,
        is_neox_style: bool | None = None,
        implementation: str | None = None,
        out_of_range: OutOfRange = "nan",
        table: TableName = "flat",
    ) -> _Shell:
        """The rotary embedding of a model, from its config.json.

        Args:
          hf_config: as `config_from_hf` takes it.
          layer_type: which layers, for models whose layers differ.
          max_position_embeddings: rows of the table, in place of the config's own.
          is_neox_style: the pairing, in place of the model type's.
          implementation: the name of a route (docs/pages/platforms.md), or None.
          out_of_range: what positions past the table read.
          table: the table kind, "flat" or "two_level".

        Raises:
          ValueError, TypeError: as `config_from_hf`, and where these layers have none.
        """
        config = config_from_hf(
            hf_config,
            layer_type=layer_type,
            max_position_embeddings=max_position_embeddings,
            is_neox_style=is_neox_style,
        )
        if config is None:
            which = "this model has"
            if layer_type is not None:
                which = f"layers of type {layer_type!r} have"
            raise ValueError(
                f"{which} no rotary embedding, so there is no layer to make; "
                f"config_from_hf returns None there"
            )
        make: type = cls  # Its constructor is the framework's.
        return make(
            config=config,
            implementation=implementation,
            out_of_range=out_of_range,
            table=table,
        )

    def rows(
        self, positions: ArrayLike
    ) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
        """This step's rows, for all layers: see `jrope.lookup`."""
        raise NotImplementedError

    def _look_up(
        self, array: Array, positions: ArrayLike
    ) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
        """This step's rows of the table around `array`."""
        check_frequencies(self.config, positions)
        return lookup(
            wrap_table(self.config, array, self.table),
            positions,
            layout=self.config.layout,
            out_of_range=self.out_of_range,
        )

    @overload
    def rotate(
        self, query: Array, key: Array, cos: Array, sin: Array, *, inverse: bool = ...
    ) -> tuple[Array, Array]: ...
    @overload
    def rotate(
        self, query: Array, key: None, cos: Array, sin: Array, *, inverse: bool = ...
    ) -> tuple[Array, None]: ...
    def rotate(
        self,
        query: Float[Array, "... NH"],
        key: Float[Array, "... KH"] | None,
        cos: Float32[Array, "... half"],
        sin: Float32[Array, "... half"],
        *,
        inverse: bool = False,
    ) -> tuple[Array, Array | None]:
        """Rotates one layer's heads by this step's rows: see `jrope.rotate`."""
        return rotate(
            query,
            key,
            cos,
            sin,
            layout=self.config.layout,
            inverse=inverse,
            implementation=self.implementation,
        )

    @overload
    def __call__(
        self, positions: ArrayLike, query: Array, key: Array, *, inverse: bool = ...
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self, positions: ArrayLike, query: Array, key: None, *, inverse: bool = ...
    ) -> tuple[Array, None]: ...
    def __call__(
        self,
        positions: ArrayLike,
        query: Float[Array, "... NH"],
        key: Float[Array, "... KH"] | None,
        *,
        inverse: bool = False,
    ) -> tuple[Array, Array | None]:
        """`rows` and `rotate` in one call, for a single layer."""
        cos, sin = self.rows(positions)
        return self.rotate(query, key, cos, sin, inverse=inverse)


def on_all_axes(
    positions: Int32[Array, "..."], config: RopeConfig, *, text_ndim: int
) -> Int32[Array, "..."]:
    """Positions as a config wants them; those of text are the same on every axis.

    Args:
      positions: [*B, T], or [A, *B, T] already.
      config: with an axis map or without.
      text_ndim: the rank of positions of text, which stacks give to models with several
        axes as well.
    """
    axes = config.layout.position_axes
    if axes is None or positions.ndim != text_ndim:
        return positions
    return jnp.broadcast_to(positions[None], (axes, *positions.shape))


def table_sharding(rows: int, mesh: Mesh, rows_over: str | None) -> NamedSharding:
    """How a table lies on a mesh: whole on each device, or its rows split over an axis.

    Raises:
      ValueError: if the mesh has no such axis, or it does not divide the rows.
    """
    if rows_over is None:
        return NamedSharding(mesh, PartitionSpec())
    if rows_over not in mesh.axis_names:
        raise ValueError(
            f"rows_over must be None or one of the mesh's axes {mesh.axis_names}, got "
            f"{rows_over!r}"
        )
    if rows % mesh.shape[rows_over]:
        raise ValueError(
            f"a table's rows must be a multiple of the {mesh.shape[rows_over]} devices "
            f"of axis {rows_over!r}, got {rows}; a flat table has one a position, so "
            f"that max_position_embeddings can be rounded up; other kinds stay whole"
        )
    return NamedSharding(mesh, PartitionSpec(rows_over))
