"""One prompt to serve, and what becomes of it."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jrope.demo.media import Medium, cache_keys, grids
from jrope.positions import PositionPlan, PositionSpec, plan


class RequestError(ValueError):
    """A request could never be served."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Request:
    """One prompt and what became of it.

    Attributes:
      name: its number, for people.
      text: what people are shown of the prompt.
      prompt: all its token ids.
      arrival: it arrives when the server has computed this many tokens.
      media: images and videos in the prompt, in order.
      plan: of its rotary positions; there once it is admitted.
      computed: prompt tokens whose keys and values are in the pool.
      hit_tokens: those of them that another request had computed.
      pages: of the pool, in order.
      output: token ids of the answer.
      samples: for each of them, what `StepResult.sample` held.
      arrived, admitted, first_token, finished: moments, seconds.
    """

    name: int
    text: str
    prompt: list[int]
    arrival: int
    media: tuple[Medium, ...] = ()
    plan: PositionPlan = dataclasses.field(init=False, repr=False)
    computed: int = 0
    hit_tokens: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    output: list[int] = dataclasses.field(default_factory=list)
    samples: list[np.ndarray] = dataclasses.field(default_factory=list)
    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def is_decoding(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.computed == len(self.prompt)

    @property
    def pending(self) -> int:
        """Index of the first token that is not computed yet."""
        return self.computed + max(len(self.output) - 1, 0)

    def make_plan(self, rule: PositionSpec) -> None:
        """Plans the rotary positions.

        Raises:
          PositionError: if media and tokens do not fit together.
        """
        self.plan = plan(
            rule,
            np.asarray(self.prompt, np.int32),
            image_grid_thw=grids(self.media, "image"),
            video_grid_thw=grids(self.media, "video"),
        )

    @functools.cached_property
    def cache_keys(self) -> list[int]:
        """What the page book knows the prompt by, one number a token."""
        return cache_keys(self.prompt, self.media)


def check_requests(
    requests: Sequence[Request], *, context: int, new_tokens: int
) -> None:
    """Checks that prompts and answers fit the context.

    Raises:
      RequestError: if one does not.
    """
    for request in requests:
        length = len(request.prompt)
        if not length:
            raise RequestError(f"prompt {request.name} is empty")
        if length + new_tokens > context:
            raise RequestError(
                f"prompt {request.name} must fit the context of {context} with its "
                f"{new_tokens} new tokens, got {length} tokens; shorten it or raise "
                f"--context"
            )
