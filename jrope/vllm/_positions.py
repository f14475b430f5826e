"""vLLM's names for position builders, over `jrope.positions`.

For code that calls the static methods of vLLM's `MRotaryEmbedding`; new code is faster
with `jrope.positions` itself, which stores no positions and takes a batch in one call.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jrope.positions import PositionPlan, PositionSpec, plan, spec

HfConfig = Mapping[str, Any] | PositionSpec | object


def get_input_positions(
    input_tokens: ArrayLike,
    hf_config: HfConfig,
    image_grid_thw: ArrayLike | None,
    video_grid_thw: ArrayLike | None,
    second_per_grid_ts: ArrayLike | None = None,
    context_len: int = 0,
    seq_len: int | None = None,
    audio_feature_lengths: ArrayLike | None = None,
    use_audio_in_video: bool = False,
) -> tuple[list[list[int]], int]:
    """`get_input_positions_tensor` with positions as lists.

    Raises:
      PositionError: as `get_input_positions_tensor`.

    >>> get_input_positions([7, 8, 9], {"model_type": "qwen2_vl"}, [], [])
    ([[0, 1, 2], [0, 1, 2], [0, 1, 2]], 0)
    """
    positions, delta = get_input_positions_tensor(
        input_tokens,
        hf_config,
        image_grid_thw,
        video_grid_thw,
        second_per_grid_ts,
        context_len,
        seq_len,
        audio_feature_lengths,
        use_audio_in_video,
    )
    return positions.tolist(), delta


def get_input_positions_tensor(
    input_tokens: ArrayLike,
    hf_config: HfConfig,
    image_grid_thw: ArrayLike | None,
    video_grid_thw: ArrayLike | None,
    second_per_grid_ts: ArrayLike | None = None,
    context_len: int = 0,
    seq_len: int | None = None,
    audio_feature_lengths: ArrayLike | None = None,
    use_audio_in_video: bool = False,
) -> tuple[np.ndarray, int]:
    """M-RoPE positions of a prompt's tokens from `context_len` to `seq_len`.

    Args:
      input_tokens: ids of the whole prompt; a numpy array spares most of the time.
      hf_config: the model's config, as a mapping or a transformers object, or a
        `PositionSpec`, which spares reading it at every call.
      image_grid_thw: int [images, 3], in patches; empty or None for none.
      video_grid_thw: the same of the videos.
      second_per_grid_ts: seconds between two frames of a video's grid.
      context_len: the first token whose positions are wanted.
      seq_len: the token after the last; None for the prompt's end.
      audio_feature_lengths: feature frames of every audio.
      use_audio_in_video: whether videos hold their sound.

    Returns:
      numpy int64 [A, tokens] where vLLM has a torch tensor, and `mrope_position_delta`.
      Both are of whole numbers, cut as vLLM does for Qwen3-Omni.

    Raises:
      PositionError: the prompt and its media do not fit; vLLM returns wrong positions.

    >>> ids = [7, 151652] + 4 * [151655] + [151653]
    >>> config = {"model_type": "qwen2_vl"}
    >>> get_input_positions(ids, config, [[1, 4, 4]], [], context_len=5)
    ([[2, 4], [3, 4], [3, 4]], -2)
    """
    made = plan(
        _spec_of(hf_config),
        np.asarray(input_tokens),
        image_grid_thw=image_grid_thw,
        video_grid_thw=video_grid_thw,
        second_per_grid_ts=second_per_grid_ts,
        audio_lengths=audio_feature_lengths,
        use_audio_in_video=use_audio_in_video,
    )
    # As a slice of the whole prompt's positions: vLLM takes any bounds.
    start, stop, _ = slice(context_len, seq_len).indices(made.num_tokens)
    return made.positions(start, max(start, stop), np.int64), int(made.delta)


def get_next_input_positions(
    mrope_position_delta: int, context_len: int, seq_len: int
) -> list[list[int]]:
    """Positions of decoded tokens, from index `context_len` to `seq_len`.

    Args:
      mrope_position_delta: of the request.
      context_len: index of the first token.
      seq_len: index after the last.

    Returns:
      Three equal lists, as vLLM's.

    >>> get_next_input_positions(-2, 7, 9)
    [[5, 6], [5, 6], [5, 6]]
    """
    # Not numpy's integers, which may be too narrow for the sum.
    delta = operator.index(mrope_position_delta)
    row = range(operator.index(context_len) + delta, operator.index(seq_len) + delta)
    return [list(row) for _ in range(3)]


def get_next_input_positions_tensor(
    out: np.ndarray,
    out_offset: int,
    mrope_position_delta: int,
    context_len: int,
    num_new_tokens: int,
) -> None:
    """Writes the positions of decoded tokens into columns of a buffer.

    Args:
      out: int32 or int64 [A, capacity].
      out_offset: column of the first token.
      mrope_position_delta: of the request.
      context_len: index of the first token.
      num_new_tokens: how many.

    Raises:
      PositionError: out_shape, out_dtype; nothing is written then. vLLM writes what
        fits.

    >>> out = np.zeros((3, 4), np.int32)
    >>> get_next_input_positions_tensor(out, 1, -2, 7, 2)
    >>> out[0].tolist()
    [0, 5, 6, 0]
    """
    start = operator.index(mrope_position_delta) + operator.index(context_len)
    rows = out.shape[0] if isinstance(out, np.ndarray) and out.ndim == 2 else 3
    # Of other counts of rows there is no family: `fill` refuses them by name.
    rows = rows if rows in (1, 2, 3, 4) else 3
    stop = start + operator.index(num_new_tokens)
    _text_plan(rows).fill(out, start, stop, out_offset)


@functools.cache
def _text_plan(axes: int) -> PositionPlan:
    """A prompt of text, whose token i is at position i on every axis."""
    return PositionPlan(spec("text", axes=axes), 0, None)


def _spec_of(hf_config: HfConfig) -> PositionSpec:
    if isinstance(hf_config, PositionSpec):
        return hf_config
    config: Any = hf_config if isinstance(hf_config, Mapping) else _to_dict(hf_config)
    made = spec(str(config.get("model_type")), config)
    return dataclasses.replace(made, fractional=False) if made.fractional else made


def _to_dict(hf_config: Any) -> Any:
    if not hasattr(hf_config, "to_dict"):
        raise TypeError(
            f"hf_config must be a mapping, a transformers config or a PositionSpec, "
            f"got {type(hf_config).__name__}"
        )
    return hf_config.to_dict()
