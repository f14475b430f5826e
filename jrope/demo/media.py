"""Images and videos in a prompt: where they are, what they look like, which they are.

The demo has no vision tower. A medium's features, which such a tower would make of its
pixels, are given: the decoder, its positions and its cache cannot tell.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jrope.positions import PositionPlan

Kind = Literal["image", "video"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Medium:
    """An image or a video in a prompt.

    Attributes:
      kind: which of the two.
      grid_thw: frames, rows and columns of patches, as image processors give them.
      start: index of its first token in the prompt.
      features: float32 [tokens, D], they take the place of its tokens' embeddings.
    """

    kind: Kind
    grid_thw: tuple[int, int, int]
    start: int
    features: np.ndarray

    @property
    def stop(self) -> int:
        """Index of the first token after it."""
        return self.start + len(self.features)

    @functools.cached_property
    def identity(self) -> int:
        """A number of its content, negative, so that it is no token's id."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(repr((self.kind, self.grid_thw)).encode())
        digest.update(self.features.tobytes())
        return -1 - (int.from_bytes(digest.digest()) >> 1)


class MediaRows(NamedTuple):
    """What a step is told of media, for B sequences of T tokens.

    Attributes:
      features: float32 [B, T, D].
      is_media: bool [B, T], where they count.
    """

    features: np.ndarray
    is_media: np.ndarray

    @classmethod
    def empty(cls, shape: tuple[int, int], width: int) -> "MediaRows":
        """Rows [B, T] without a medium."""
        return cls(np.zeros((*shape, width), np.float32), np.zeros(shape, bool))

    def write(self, row: int, media: Sequence[Medium], start: int, stop: int) -> None:
        """Fills a row with what lies in tokens `start` to `stop` of its prompt."""
        for medium in media:
            first, last = max(medium.start, start), min(medium.stop, stop)
            if first < last:
                here = slice(first - start, last - start)
                there = slice(first - medium.start, last - medium.start)
                self.features[row, here] = medium.features[there]
                self.is_media[row, here] = True


def cache_keys(prompt: Sequence[int], media: Sequence[Medium]) -> list[int]:
    """What a cache tells prefixes apart by: the ids, and in a medium its identity.

    Its ids are the same number over and over, whatever can be seen in it.
    """
    keys = list(prompt)
    for medium in media:
        keys[medium.start : medium.stop] = [medium.identity] * len(medium.features)
    return keys


def grids(media: Sequence[Medium], kind: Kind) -> np.ndarray | None:
    """T, H, W of the media of a kind, int32 [n, 3]; None if there are none."""
    found = [medium.grid_thw for medium in media if medium.kind == kind]
    return np.asarray(found, np.int32) if found else None


def grid_starts(
    plan: PositionPlan, media: Sequence[Medium], start: int, stop: int
) -> np.ndarray:
    """Of tokens `start` to `stop`: the position where their grid begins, 0 for text."""
    starts = np.zeros(stop - start, np.int32)
    for medium in media:
        here = slice(max(medium.start - start, 0), max(medium.stop - start, 0))
        starts[here] = plan.positions(medium.start, medium.start + 1)[0, 0]
    return starts
