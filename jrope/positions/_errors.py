"""What is wrong with a request, in a form that programs and people can read."""

CODES = {
    "too_few_grids": "fewer grids than media in the prompt; was one left out?",
    "too_many_grids": "more grids than media in the prompt; do they belong to it?",
    "token_count": (
        "a medium's tokens do not match its grid; was another spatial_merge_size used, "
        "or was the placeholder not expanded?"
    ),
    "grid_not_divisible": "rows and columns must be multiples of spatial_merge_size",
    "grid_nonpositive": "every entry of a grid must be at least 1 after merging",
    "truncated": (
        "the prompt ends inside a medium; pass truncate='clip' if that is meant"
    ),
    "too_few_seconds": "every video needs its second_per_grid_ts",
    "too_many_seconds": "more second_per_grid_ts than videos in the prompt",
    "seconds_invalid": "second_per_grid_ts must be finite, not negative, and in range",
    "too_few_audio_lengths": "every audio needs its length in feature frames",
    "too_many_audio_lengths": "more audio_lengths than audios in the prompt",
    "unknown_family": "no family of that name",
    "input": "an input has the wrong type or shape",
    "capacity": "more than the buffer was made for",
    "slot": "a slot is empty, taken, or none of this batch",
    "out_shape": "the window does not fit into the array",
    "out_dtype": "positions of this family do not go into an array of this kind",
    "position_beyond_table": "a position has no row in the table of cos and sin",
    "too_long": "more than any model takes; is it a whole data set?",
}
# Kernels return minus one, minus two, ... for these.
_ORDER = tuple(CODES)
TOO_FEW_GRIDS = -1 - _ORDER.index("too_few_grids")
TOO_MANY_GRIDS = -1 - _ORDER.index("too_many_grids")
TOKEN_COUNT = -1 - _ORDER.index("token_count")
GRID_NOT_DIVISIBLE = -1 - _ORDER.index("grid_not_divisible")
GRID_NONPOSITIVE = -1 - _ORDER.index("grid_nonpositive")
TRUNCATED = -1 - _ORDER.index("truncated")
TOO_FEW_SECONDS = -1 - _ORDER.index("too_few_seconds")
TOO_MANY_SECONDS = -1 - _ORDER.index("too_many_seconds")
SECONDS_INVALID = -1 - _ORDER.index("seconds_invalid")
TOO_FEW_AUDIO_LENGTHS = -1 - _ORDER.index("too_few_audio_lengths")
TOO_MANY_AUDIO_LENGTHS = -1 - _ORDER.index("too_many_audio_lengths")
CAPACITY = -1 - _ORDER.index("capacity")
SLOT = -1 - _ORDER.index("slot")
INPUT = -1 - _ORDER.index("input")
POSITION_BEYOND_TABLE = -1 - _ORDER.index("position_beyond_table")
TOO_LONG = -1 - _ORDER.index("too_long")

# Letters of what came that a message shows.
_LONGEST = 300
KINDS = ("text", "image", "video", "audio")
IMAGE_KIND, VIDEO_KIND, AUDIO_KIND = 1, 2, 3


class PositionError(ValueError):
    """A request whose positions cannot be built; nothing was written.

    Args:
      code: one of `CODES`.
      index: which medium of its kind, or which entry of a batch, from 0.
      expected: what had to hold, mostly a count.
      got: what came.
      kind: "image", "video" or "audio" where a medium is at fault.
      token: index of the token where the fault was seen.
      hint: words in place of the code's own.

    >>> from jrope.positions import plan, spec
    >>> try:
    ...     plan(spec("qwen2_vl"), [151655], image_grid_thw=[[1, 4, 4]])
    ... except PositionError as error:
    ...     print(error.code, error.expected, error.got)
    truncated 2 1
    """

    def __init__(
        self,
        code: str,
        *,
        index: int | None = None,
        expected: object = None,
        got: object = None,
        kind: str | None = None,
        token: int | None = None,
        hint: str | None = None,
    ) -> None:
        """Composes the message: where, what must hold, what came, the likely cause."""
        self.code, self.index, self.kind, self.token = code, index, kind, token
        self.expected, self.got = expected, got
        where = f" {kind or 'entry'} {index}" if index is not None else ""
        at = f" at token {token}" if token is not None else ""
        facts = (
            f": expected {expected}, got {_cut(got)}"
            if expected is not None or got is not None
            else ""
        )
        super().__init__(f"{code}{where}{at}{facts}; {hint or CODES[code]}")


def from_kernel(
    status: int, kind: int, index: int, expected: float, got: float, token: int
) -> PositionError:
    """The error that a kernel's negative status stands for."""
    code = _ORDER[-1 - int(status)]
    return PositionError(
        code,
        index=int(index) if index >= 0 else None,
        expected=_plain(expected),
        got=_plain(got),
        kind=KINDS[int(kind)] if kind else None,
        token=int(token) if token >= 0 else None,
    )


def _cut(got: object) -> str:
    """What came, as far as anyone reads."""
    text = str(got)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)
