"""The figures of one run: what `--json` prints and what the last table shows."""

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Literal

import jax

from jrope.demo.faults import FaultName
from jrope.demo.requests import Request
from jrope.demo.scheduler import Totals
from jrope.demo.selfcheck import TOLERANCE, GoldenResult, ServedResult
from jrope.demo.weights import ModelName

_LONG = 128  # tokens: below, a prompt takes one or two steps, hit or not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """How long each stage took."""

    load: float
    compile: float
    serve: float
    check: float
    total: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes; `peak_resident` is None where the system does not tell."""

    weights: int
    rope_tables: int
    page_pool: int
    peak_resident: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Everything that was measured.

    Attributes:
      self_check: of what was served, and of the golden logits where there are any.
      golden: of the golden logits alone; "none" for a model whose weights are not
        published, and then the figures of them are None.
      images, videos, distinct_grids: in the prompts.
      media_tokens: of the prompts' tokens those that stand for images and videos.
      media_cuts: how often a chunk or a prefix hit ended inside one.
      seconds_to_first_token_with_hit, seconds_to_first_token_without_hit: medians over
        prompts of 128 tokens or more, from a request's admission to a slot; with a hit
        means that at least half of the prompt was found. None where there are none.
      median_queue_seconds: from arrival to admission, over all requests.
    """

    model: ModelName
    broken: FaultName | None
    jax_version: str
    platform: str
    self_check: Literal["ok", "fail"]
    golden: Literal["ok", "fail", "none"]
    golden_logit_difference: float | None
    golden_argmax_equal: int | None
    golden_tokens: int | None
    worst_logit_difference: float
    served_tokens_agreeing: int
    served_tokens: int
    tolerance: float = TOLERANCE
    programs: int
    recompiles_after_warmup: int
    requests: int
    prompt_tokens: int
    images: int
    videos: int
    distinct_grids: int
    media_tokens: int
    media_cuts: int
    prefix_hit_tokens: int
    prefix_hit_rate: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    decode_steps: int
    mean_decode_batch: float
    seconds_to_first_token_with_hit: float | None
    seconds_to_first_token_without_hit: float | None
    median_queue_seconds: float
    memory: Memory
    seconds: Seconds

    @property
    def ok(self) -> bool:
        """Whether the check passed and nothing was compiled while serving."""
        return self.self_check == "ok" and not self.recompiles_after_warmup

    def to_json(self) -> str:
        """One line of JSON; what is not a finite number becomes null."""
        return json.dumps(_finite(dataclasses.asdict(self)), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def make_figures(
    *,
    model: ModelName,
    broken: FaultName | None,
    golden: GoldenResult | None,
    redone: Sequence[ServedResult],
    programs: int,
    recompiles: int,
    requests: Sequence[Request],
    totals: Totals,
    memory: Memory,
    seconds: Seconds,
) -> Figures:
    """Works the figures out of what each stage left."""
    prompt_tokens = sum(len(request.prompt) for request in requests)
    media = [medium for request in requests for medium in request.media]
    all_ok = (golden is None or golden.ok) and all(one.ok for one in redone)
    return Figures(
        model=model,
        broken=broken,
        jax_version=jax.__version__,
        platform=jax.default_backend(),
        self_check="ok" if all_ok else "fail",
        golden="none" if golden is None else "ok" if golden.ok else "fail",
        golden_logit_difference=None if golden is None else golden.difference,
        golden_argmax_equal=None if golden is None else golden.argmax_equal,
        golden_tokens=None if golden is None else golden.tokens,
        worst_logit_difference=_worst([one.difference for one in redone]),
        served_tokens_agreeing=sum(one.agreeing for one in redone),
        served_tokens=sum(one.tokens for one in redone),
        programs=programs,
        recompiles_after_warmup=recompiles,
        requests=len(requests),
        prompt_tokens=prompt_tokens,
        images=sum(medium.kind == "image" for medium in media),
        videos=sum(medium.kind == "video" for medium in media),
        distinct_grids=len({medium.grid_thw for medium in media}),
        media_tokens=sum(len(medium.features) for medium in media),
        media_cuts=totals.media_cuts,
        prefix_hit_tokens=totals.hit_tokens,
        prefix_hit_rate=totals.hit_tokens / prompt_tokens,
        prefill_tokens_per_second=_rate(totals.prefill_tokens, totals.prefill_seconds),
        decode_tokens_per_second=_rate(totals.decode_tokens, totals.decode_seconds),
        decode_steps=totals.decode_steps,
        mean_decode_batch=_rate(totals.decode_tokens, totals.decode_steps),
        seconds_to_first_token_with_hit=_first_token(requests, hit=True),
        seconds_to_first_token_without_hit=_first_token(requests, hit=False),
        median_queue_seconds=statistics.median(
            request.admitted - request.arrived for request in requests
        ),
        memory=memory,
        seconds=seconds,
    )


def _worst(differences: Sequence[float]) -> float:
    """The largest; NaN if any is."""
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _rate(amount: float, per: float) -> float:
    return amount / per if per else 0.0


def _first_token(requests: Sequence[Request], *, hit: bool) -> float | None:
    """Median seconds from admission to the first token, over long prompts."""
    waits = [
        request.first_token - request.admitted
        for request in requests
        if len(request.prompt) >= _LONG
        and (2 * request.hit_tokens >= len(request.prompt) if hit else True)
        and (hit or not request.hit_tokens)
    ]
    return statistics.median(waits) if waits else None


def peak_resident_bytes() -> int | None:
    """The most memory that this process has had, or None where nobody knows."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
