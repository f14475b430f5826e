"""What a RoPE scaling is: the interface, and the series that every one starts from."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np

from jrope._show import show

# In extended precision: np.pi is rounded to float64.
TWO_PI = np.longdouble("6.28318530717958647692528676655900577")
# Of float32, without those that have lost bits.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that a scaling's formula starts from.

    Args:
      rope_theta: base of the geometric series of frequencies.
      rotary_dim: features rotated, R.
      head_dim: features per head, H.
      max_position_embeddings: rows of the table, P.

    >>> geometry = Geometry(rope_theta=1e4, rotary_dim=4, head_dim=8,
    ...     max_position_embeddings=64)
    >>> geometry.series().astype(float).tolist()
    [1.0, 0.01]
    """

    rope_theta: float
    rotary_dim: int
    head_dim: int
    max_position_embeddings: int

    def series(self, *, theta_factor: np.longdouble | float = 1.0) -> np.ndarray:
        """The unscaled series `theta ** (-2i / R)` [R/2], its base times a factor."""
        theta = np.longdouble(self.rope_theta) * theta_factor
        return geometric_inv_freq(theta, self.rotary_dim)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Frequencies:
    """What a scaling makes of a geometry.

    Args:
      inv_freq: radians per position [R/2], in the platform's extended precision.
      attention_factor: multiplies cos and sin.
      softmax_scale_factor: multiplies the attention's softmax scale; never in the
        table.

    >>> made = Frequencies(inv_freq=np.array([1.0, 0.01]))
    >>> made.attention_factor, made.softmax_scale_factor
    (1.0, 1.0)
    """

    inv_freq: np.ndarray
    attention_factor: float = 1.0
    softmax_scale_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(abc.ABC):
    """A RoPE scaling: a frozen dataclass whose fields are the keys of a config.json.

    A subclass's fields carry Hugging Face's names; those without a default are required
    by the config reader, and those made by `choice` are no keys of a config.json but
    the user's. The class variables are data for the reader, the errors and the tests.

    Attributes:
      rope_type: the value of the `rope_type` key.
      aliases: other values of that key with the same meaning.
      meaningless_keys: keys that real configs carry under this type although its
        formula has no use for them, each with the model where it was seen.
      examples: the RoPE keys of real models' config.json, by model name.
      rotates_whole_head: whether R is always H, `partial_rotary_factor` being a key of
        the scaling itself.

    >>> from jrope.scalings import Linear, SCALINGS
    >>> SCALINGS["linear"] is Linear, isinstance(Linear(factor=2.0), Scaling)
    (True, True)
    """

    rope_type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    meaningless_keys: ClassVar[Mapping[str, str]] = {}
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    rotates_whole_head: ClassVar[bool] = False

    @abc.abstractmethod
    def frequencies(self, geometry: Geometry) -> Frequencies:
        """Inverse frequencies and factors for one geometry."""

    def pinned(self, max_position_embeddings: int) -> Self:
        """Fills in what a config.json leaves to be derived from its own length.

        The reader calls it, so that a table of another length keeps the model's values.
        """
        del max_position_embeddings
        return self

    def for_length(self, total_length: int) -> Self:
        """The scaling of a request of this declared total length.

        Most scalings are the same for every request. Those that are not choose once,
        for the life of the request: cached keys were turned by the choice.
        """
        del total_length
        return self

    def longest_request(self, max_position_embeddings: int) -> int:
        """The longest request that these frequencies are for, in positions.

        Rows past it are NaN: a longer request needs `for_length`.
        """
        return max_position_embeddings

    def trained_length(self, max_position_embeddings: int) -> int | None:
        """Context length of pre-training in positions, where the config tells it."""
        del max_position_embeddings
        return getattr(self, "original_max_position_embeddings", None)

    def warnings(self, max_position_embeddings: int) -> list[str]:
        """What to look at in a config of this length, for people: see `explain`."""
        if self.trained_length(max_position_embeddings) is None:
            return ["the config does not say the length of pre-training"]
        return []


def choice(default: Any) -> Any:
    """A field of a scaling that the user chooses and no config.json names."""
    return dataclasses.field(default=default, metadata={"user_choice": True})


def config_keys(scaling: type[Scaling]) -> dict[str, bool]:
    """The keys of a config.json that a scaling takes: whether each is required.

    >>> from jrope.scalings import Llama3, Linear
    >>> config_keys(Linear)
    {'factor': True}
    """
    return {
        field.name: field.default is dataclasses.MISSING
        for field in dataclasses.fields(scaling)
        if not field.metadata.get("user_choice")
    }


def geometric_inv_freq(rope_theta: np.longdouble | float, dim: int) -> np.ndarray:
    """The series `theta ** (-2i / dim)`, np.longdouble [dim/2].

    Extended precision, where the platform has it, keeps angles exact to far below the
    rounding of a float32 table at any position.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.3.

    >>> geometric_inv_freq(10000.0, 4).astype(float).tolist()
    [1.0, 0.01]
    """
    return np.longdouble(rope_theta) ** (
        -np.arange(0, dim, 2, dtype=np.longdouble) / dim
    )


def check_number(name: str, value: object, *, above: float = 0.0) -> None:
    """Raises unless `value` is a finite real number greater than `above`.

    Args:
      name: of the number, for the message.
      value: to check.
      above: what it must exceed.

    Raises:
      TypeError, ValueError: if it is not.

    >>> check_number("factor", 4.0)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {show(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= above:
        raise ValueError(f"{name} must be finite and above {above:g}, got {number}")


def check_optional_number(name: str, value: object, *, above: float = 0.0) -> None:
    """`check_number` for a value that may be None."""
    if value is not None:
        check_number(name, value, above=above)


def check_amplitude(name: str, value: float, source: str = "") -> None:
    """Raises unless `value` can multiply float32 numbers and keep them.

    Args:
      name: of the factor, for the message.
      value: to check.
      source: what made it, for the message.
    """
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(
            f"{name} must be a positive float32, neither 0 nor infinite nor "
            f"subnormal, got {value}{source}"
        )


def check_optional_amplitude(name: str, value: float | None) -> None:
    """`check_amplitude` for a number of a config, or None."""
    if value is not None:
        check_number(name, value)
        check_amplitude(name, float(value))
