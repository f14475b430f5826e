"""Rotations broken on purpose: the proof that the self-check can see a wrong one."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from jrope import RopeConfig
from jrope.demo.spec import LayerType

FaultName = Literal[
    "pairing",
    "local-base",
    "chunk+1",
    "prefix+1",
    "decode+1",
    "axes-swapped",
    "delta-dropped",
    "grid-restarted",
]
RopeConfigs = dict[LayerType, RopeConfig]


class FaultError(ValueError):
    """The fault cannot show in what was asked for."""


class Fault:
    """No fault at all; the others override one of its methods.

    Attributes:
      happened: whether anything was changed.
      hint: what would have to be the case for the fault to show.
    """

    happened = False
    hint = ""

    def change_configs(self, configs: Mapping[LayerType, RopeConfig]) -> RopeConfigs:
        """What the rotary layers are made from."""
        return dict(configs)

    def shift(self, step: "StepFacts") -> int | np.ndarray:
        """What is added to the positions that the rotary layers are told."""
        return 0

    def move(self, positions: np.ndarray, step: "StepFacts") -> np.ndarray:
        """The positions that the rotary layers are told; padding is left alone.

        Args:
          positions: the right ones, int32 [A, T] or [T].
          step: what they are of.
        """
        shift = self.shift(step)
        self.happened = self.happened or bool(np.any(shift))
        return np.where(positions < 0, positions, positions + shift).astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What a fault may depend on.

    Attributes:
      chunk: how many chunks of the prompt's length lie before this step.
      prefix_hit: whether the request began with pages computed by another.
      decoding: whether the prompt is done.
      delta: what a generated token's position is apart from its index.
      grid_starts: for each token of an image or a video the position where its grid
        begins, 0 for text; int32 [T].
    """

    chunk: int
    prefix_hit: bool
    decoding: bool
    delta: int = 0
    grid_starts: np.ndarray | int = 0


class Pairing(Fault):
    """Rotates the wrong pairs of features."""

    def change_configs(self, configs: Mapping[LayerType, RopeConfig]) -> RopeConfigs:
        """Swaps NeoX and GPT-J."""
        self.happened = True
        return {
            kind: dataclasses.replace(config, is_neox_style=not config.is_neox_style)
            for kind, config in configs.items()
        }


class LocalBase(Fault):
    """Rotates the sliding layers with the base of the global ones."""

    hint = "the model has one base only, for all its layers; try --model gemma3"

    def change_configs(self, configs: Mapping[LayerType, RopeConfig]) -> RopeConfigs:
        """Gives every layer type the global rotation.

        Raises:
          FaultError: if there is only one.
        """
        if len(configs) == 1:
            raise FaultError(self.hint)
        self.happened = True
        return dict.fromkeys(configs, configs["full_attention"])


class ChunkPlusOne(Fault):
    """Positions gain one at each border between prefill chunks."""

    hint = "no prompt went past its first chunk; try a smaller --chunk"

    def shift(self, step: StepFacts) -> int:
        """One a border."""
        return 0 if step.decoding else step.chunk


class PrefixPlusOne(Fault):
    """What follows a cached prefix is rotated one too far."""

    hint = "no prompt began with a cached prefix"

    def shift(self, step: StepFacts) -> int:
        """One, in the prefill after a hit."""
        return int(step.prefix_hit and not step.decoding)


class DecodePlusOne(Fault):
    """Generated tokens are rotated one too far."""

    hint = "no answer had a second token; try a larger --new-tokens"

    def shift(self, step: StepFacts) -> int:
        """One, after the prompt."""
        return int(step.decoding)


class MediaFault(Fault):
    """One that shows in media only: faults of M-RoPE."""

    hint = "no prompt had an image or a video"

    def change_configs(self, configs: Mapping[LayerType, RopeConfig]) -> RopeConfigs:
        """Leaves them alone.

        Raises:
          FaultError: if positions have one axis only.
        """
        if all(config.axis_of_frequency is None for config in configs.values()):
            raise FaultError(
                "the model takes no images, and its positions have one axis only; try "
                "--model tiny-qwen2-vl"
            )
        return dict(configs)


class AxesSwapped(MediaFault):
    """Rows drive the frequencies of columns, and columns those of rows."""

    def move(self, positions: np.ndarray, step: StepFacts) -> np.ndarray:
        """The same positions with axes 1 and 2 exchanged."""
        moved = positions[[0, 2, 1]]
        self.happened = self.happened or bool(np.any(moved != positions))
        return moved


class DeltaDropped(MediaFault):
    """Generated tokens get their index for a position."""

    def shift(self, step: StepFacts) -> int:
        """Takes the delta away again, after the prompt."""
        return -step.delta if step.decoding else 0


class GridRestarted(MediaFault):
    """The positions of every grid begin at 0, not where the text before it ends."""

    def shift(self, step: StepFacts) -> int | np.ndarray:
        """Takes the beginning away, in media."""
        return -step.grid_starts


FAULTS: dict[FaultName, type[Fault]] = {
    "pairing": Pairing,
    "local-base": LocalBase,
    "chunk+1": ChunkPlusOne,
    "prefix+1": PrefixPlusOne,
    "decode+1": DecodePlusOne,
    "axes-swapped": AxesSwapped,
    "delta-dropped": DeltaDropped,
    "grid-restarted": GridRestarted,
}
