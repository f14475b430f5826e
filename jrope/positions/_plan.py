"""A plan: the positions of one request as a few segments, written out on demand."""

import operator

import numpy as np
from numpy.typing import DTypeLike

from jrope.positions._errors import PositionError
from jrope.positions._fill import FILL_TABLE, FILL_TEXT
from jrope.positions._rule import MOST_TOKENS
from jrope.positions._spec import PositionSpec
from jrope.positions._table import PLANNED, ROWS, SHIFT, TOP

_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))
_FLOATS = (np.dtype(np.float32),)
# Kernels take int64.
_FARTHEST = 2**63 - 1


def _whole_window(start: int, stop: int, at: int) -> tuple[int, int, int]:
    """A window's ends and its column, as ints.

    Raises:
      TypeError: one is none.
    """
    try:
        return operator.index(start), operator.index(stop), operator.index(at)
    except TypeError as reason:
        raise TypeError(
            f"start, stop and out_offset must be ints, got {start!r}, {stop!r} and "
            f"{at!r}"
        ) from reason


class PositionPlan:
    """The positions of one request; made by `plan` or `plan_from_spans`.

    Holds a small table of segments, and nothing at all for a request of text only.
    Immutable, picklable, safe to use from several threads.

    Raises:
      PositionError: as `fill`.

    >>> from jrope.positions import plan, spec
    >>> made = plan(spec("qwen2_vl"), [7, 151652, *4 * [151655], 151653],
    ...     image_grid_thw=[[1, 4, 4]])
    >>> made.num_tokens, made.delta, made.positions(2, 4).tolist()
    (7, -2, [[2, 2], [2, 2], [2, 3]])
    """

    __slots__ = ("_table", "num_tokens", "spec")

    def __init__(
        self, spec: PositionSpec, num_tokens: int, table: np.ndarray | None
    ) -> None:
        """Takes a table as the scan left it, None for text."""
        self.spec = spec
        self.num_tokens = num_tokens
        self._table = table

    @property
    def axes(self) -> int:
        """Rows of the positions, A."""
        return self.spec.axes

    @property
    def is_text_only(self) -> bool:
        """Whether every token's position is its index, on every axis."""
        return self._table is None

    @property
    def table(self) -> np.ndarray | None:
        """float64 [1 + rows, COLUMNS], see _table.py; None for text."""
        if self._table is None:
            return None
        return self._table[: 1 + int(self._table[0, ROWS])]

    @property
    def delta(self) -> int | float:
        """`mrope_position_delta`: largest position + 1 - tokens.

        0 where decoding does not follow the prompt: XD-RoPE and GLM-Image.
        """
        if self.spec.decodes_images or self.spec.layout == "ordinal":
            return 0
        return self.decode_shift

    @property
    def max_position(self) -> int | float:
        """The largest position of the tokens that are planned; -1 if there are none.

        On any of the axes, that of indices (`PositionSpec.row_index`) as well.
        """
        return self._number(TOP, self.num_tokens - 1)

    @property
    def num_planned(self) -> int:
        """Tokens before plain decoding: the prompt and images to be generated."""
        return int(self._number(PLANNED, self.num_tokens))

    @property
    def decode_shift(self) -> int | float:
        """Added to the index of a token past `num_planned` for its position."""
        return self._number(SHIFT, 0)

    def _number(self, column: int, for_text: int) -> int | float:
        if self._table is None:
            return for_text
        value = float(self._table[0, column])
        return value if self.spec.fractional else int(value)

    def fill(
        self,
        out: np.ndarray,
        start: int = 0,
        stop: int | None = None,
        out_offset: int = 0,
    ) -> None:
        """Writes the positions of tokens start to stop into columns of a buffer.

        Tokens past the prompt get the positions that decoding gives them.

        Args:
          out: [A, capacity] (or [capacity] where A is 1), int32 or int64; float32 for
            a fractional family. Fastest with contiguous rows.
          start: first token of the window.
          stop: the token after its last; None is the end of the prompt.
          out_offset: column of the first of them.

        Raises:
          PositionError: out_shape, out_dtype; position_beyond_table, past int32;
            nothing is written then.
          TypeError: the window is none of ints.
        """
        if stop is None:
            stop = self.num_tokens
        code, table = self.spec.shape_code, self._table
        try:
            if table is None:
                fill = FILL_TEXT[out.dtype]
                misfit = fill.run(out, code, start, stop, out_offset)
            else:
                fill = FILL_TABLE[out.dtype]
                misfit = fill.run(table, out, code, start, stop, out_offset)
        except (TypeError, AttributeError, KeyError, OverflowError):
            misfit = self._convert_and_fill(out, start, stop, out_offset)
        if misfit:
            raise self._misfit(misfit, out, start, stop, out_offset)

    def positions(
        self, start: int = 0, stop: int | None = None, dtype: DTypeLike | None = None
    ) -> np.ndarray:
        """The positions of tokens start to stop as a new array [A, stop - start].

        Raises:
          PositionError: as `fill`; too_long.
          TypeError: the window is none of ints, or the dtype none.
        """
        stop = self.num_tokens if stop is None else stop
        try:
            width = max(stop - start, 0)
            if width > MOST_TOKENS:
                raise PositionError(
                    "too_long", expected=f"at most {MOST_TOKENS} positions", got=width
                )
            kind = self.spec.dtype if dtype is None else dtype
            out = np.empty((self.axes, width), kind)
        except TypeError:
            _whole_window(start, stop, 0)
            raise
        self.fill(out, start, stop)
        return out

    def _convert_and_fill(self, out: np.ndarray, start: int, stop: int, at: int) -> int:
        """Fills what the kernel at hand does not take, or is not ready for."""
        out = self._checked(out)
        start, stop, at = _whole_window(start, stop, at)
        if out.shape[0] != self.axes:
            return 1
        if abs(start) > _FARTHEST or abs(stop) > _FARTHEST:
            return 2
        if abs(at) > _FARTHEST:
            return 3
        rows = out
        if out.strides[1] != out.itemsize or not out.flags.aligned:
            rows = np.require(out, requirements=["C", "A"])
        window = (rows, self.spec.shape_code, start, stop, at)
        if self._table is None:
            kernel = FILL_TEXT[out.dtype]
        else:
            kernel, window = FILL_TABLE[out.dtype], (self._table, *window)
        kernel.prepare()
        misfit = kernel.run(*window)
        if rows is not out and not misfit:
            out[:] = rows
        return misfit

    def _checked(self, out: np.ndarray) -> np.ndarray:
        """`out` as [A, columns] of a kind that can hold the positions."""
        allowed = _FLOATS if self.spec.fractional else _INTEGERS
        if not isinstance(out, np.ndarray) or out.dtype not in allowed:
            raise PositionError(
                "out_dtype",
                expected=" or ".join(f"a numpy array of {kind}" for kind in allowed),
                got=getattr(out, "dtype", type(out).__name__),
            )
        if not out.flags.writeable:
            raise PositionError("out_dtype", expected="a writable array", got="not one")
        if out.ndim == 1 and self.axes == 1:
            out = out[None]
        if out.ndim != 2:
            raise PositionError(
                "out_shape",
                expected=f"[{self.axes}, columns]",
                got=f"shape {list(out.shape)}",
            )
        return np.asarray(out)

    def _misfit(
        self, misfit: int, out: np.ndarray, start: int, stop: int, at: int
    ) -> PositionError:
        start, stop, at = _whole_window(start, stop, at)
        facts = {
            1: ("out_shape", f"{self.axes} rows", out.shape[0]),
            2: ("out_shape", "0 <= start <= stop < 2^31", f"{start}, {stop}"),
            3: (
                "out_shape",
                f"{stop - start} columns from column {at} on",
                f"{out.shape[-1]} columns in all",
            ),
            4: (
                "out_dtype",
                "float32" if self.spec.fractional else "int32 or int64",
                out.dtype,
            ),
            5: (
                "position_beyond_table",
                "positions within int32",
                stop - 1 + self.decode_shift,
            ),
        }
        code, expected, got = facts[misfit]
        return PositionError(code, expected=expected, got=got)

    def __repr__(self) -> str:
        """Family, tokens and delta."""
        rows = 0 if self._table is None else int(self._table[0, ROWS])
        return (
            f"PositionPlan({self.spec.family}, num_tokens={self.num_tokens}, "
            f"delta={self.delta}, segments={rows})"
        )
