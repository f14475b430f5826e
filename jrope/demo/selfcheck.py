"""Checks what was served against two things that do not come from jrope.

1. Golden logits: what transformers computes in float32 from the same weights, where
   these are published.
2. Every served sequence, done again in one forward pass without chunks, cache or
   batch, and with positions and a rotation that are written down a second time.

Logits in float32 see every wrong rotation: correct ones agree within 4e-4, the smallest
fault that was tried moves one by 2.5e-2. Texts do not: off by one in a few positions,
the answers are often the same.
"""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from flax import nnx

from jrope.demo.engine import SAMPLE_STRIDE, embed
from jrope.demo.media import MediaRows
from jrope.demo.model import Decoder, NoMemory, Rotate
from jrope.demo.prompts import sample_text
from jrope.demo.reference import Rows, reference_rotate, reference_rows
from jrope.demo.requests import Request
from jrope.demo.spec import LayerType
from jrope.demo.tokenizer import Tokenizer
from jrope.demo.weights import ModelName

TOLERANCE = 2e-3  # of a logit
_ROWS = 32  # logits are made for so many tokens at a time: a vocabulary is wide


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenResult:
    """How the model compares with transformers, over the whole golden text.

    Attributes:
      difference: the largest of any golden logit or log-sum-exp.
      argmax_equal, tokens: at how many of the tokens the likeliest next one is equal.
      same_ids: whether the tokenizer gives the golden ids.
    """

    difference: float
    argmax_equal: int
    tokens: int
    same_ids: bool

    @property
    def ok(self) -> bool:
        """Whether all of it is within the tolerance (NaN is not)."""
        same = self.argmax_equal == self.tokens and self.same_ids
        return same and self.difference <= TOLERANCE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedResult:
    """How one served sequence compares with one forward pass over it.

    Attributes:
      difference: the largest of the compared logits.
      agreeing, tokens: how many of the answer's tokens are the likeliest ones there,
        or within the tolerance of them.
    """

    difference: float
    agreeing: int
    tokens: int

    @property
    def ok(self) -> bool:
        """Whether all of it is within the tolerance (NaN is not)."""
        return self.agreeing == self.tokens and self.difference <= TOLERANCE


class SelfCheck:
    """Redoes sequences in one forward pass each.

    Args:
      model: as it served; its rotary layers are used for the golden logits only.
    """

    def __init__(self, model: Decoder) -> None:
        """Compiles nothing yet."""
        self._spec = model.spec
        graph, self._state = nnx.split(model)
        self._with_jrope = jax.jit(functools.partial(_features_with_jrope, graph))
        self._with_reference = jax.jit(functools.partial(_features, graph))
        self._row_logits = jax.jit(functools.partial(_row_logits, graph))

    def golden(self, name: ModelName, tokenizer: Tokenizer) -> GoldenResult:
        """Compares with the golden logits of a model."""
        folder = importlib.resources.files("jrope.demo") / "golden"
        golden = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        ids, rows = golden["ids"], {row["pos"]: row for row in golden["rows"]}
        tokens, positions = _pad(ids, len(ids))
        features = self._with_jrope(self._state, tokens, positions)
        difference, equal = 0.0, 0
        for position, logits in enumerate(self._logits(features[0])):
            equal += int(logits.argmax()) == golden["argmax"][position]
            if position in rows:
                new = _golden_difference(logits, rows[position])
                difference = float(np.maximum(difference, new))  # NaN stays NaN
        return GoldenResult(
            difference=difference,
            argmax_equal=equal,
            tokens=len(ids),
            same_ids=tokenizer.encode(sample_text()) == ids,
        )

    def served(self, request: Request) -> ServedResult:
        """Redoes one served sequence and compares what every step gave."""
        sequence = request.prompt + request.output
        tokens, positions = _pad(sequence, _round_up(len(sequence)))
        features = self._with_reference(
            self._state,
            tokens,
            positions,
            self._media(request, tokens.shape[1]),
            reference_rows(self._spec, request, tokens.shape[1]),
        )
        first = len(request.prompt) - 1
        made = list(self._logits(features[0, first : first + len(request.output)]))
        logits, chosen = np.stack(made), np.asarray(request.output)
        mine = logits[np.arange(len(chosen)), chosen]
        expected = np.concatenate([mine[:, None], logits[:, ::SAMPLE_STRIDE]], axis=1)
        return ServedResult(
            difference=float(np.abs(expected - np.stack(request.samples)).max()),
            agreeing=int(np.sum(logits.max(axis=1) - mine <= TOLERANCE)),
            tokens=len(chosen),
        )

    def _media(self, request: Request, length: int) -> MediaRows | None:
        if not self._spec.takes_media:
            return None
        rows = MediaRows.empty((1, length), self._spec.width)
        rows.write(0, request.media, 0, length)
        return rows

    def _logits(self, features: jax.Array) -> Iterable[np.ndarray]:
        """The logits [V] of each token; features [T, D]."""
        host = np.asarray(features)
        for start in range(0, len(host), _ROWS):
            block = np.zeros((_ROWS, host.shape[1]), np.float32)
            rows = host[start : start + _ROWS]
            block[: len(rows)] = rows
            yield from np.asarray(self._row_logits(self._state, block))[: len(rows)]


def _golden_difference(logits: np.ndarray, row: dict[str, list[float]]) -> float:
    """The largest difference of the top logits and of the log-sum-exp."""
    exact = logits.astype(np.float64)
    largest = exact.max()
    log_sum = largest + np.log(np.exp(exact - largest).sum())
    top = exact[np.asarray(row["top"], np.int64)] - row["logit"]
    return float(max(np.abs(top).max(), abs(log_sum - row["lse"])))


def _pad(ids: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions [1, length]; what follows the ids sees them, not they it."""
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    return tokens, np.arange(length, dtype=np.int32)[None]


def _round_up(length: int) -> int:
    """128, 384, 640 ...: few lengths, so few programs to compile."""
    return 128 + -(-max(length - 128, 0) // 256) * 256


def _features_with_jrope(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State,
    tokens: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    model = nnx.merge(graph, state)
    x = model.embed(tokens)
    return model(x, positions, NoMemory(), model.rotations(positions))


def _features(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State,
    tokens: jax.Array,
    positions: jax.Array,
    media: MediaRows | None,
    rows: Rows,
) -> jax.Array:
    model = nnx.merge(graph, state)
    rotations: dict[LayerType, Rotate] = {
        kind: reference_rotate(model.spec, *row) for kind, row in rows.items()
    }
    return model(embed(model, tokens, media), positions, NoMemory(), rotations)


def _row_logits(
    graph: nnx.GraphDef[Decoder], state: nnx.State, features: jax.Array
) -> jax.Array:
    return nnx.merge(graph, state).logits(features)
