"""The command line: loads a model, serves requests with it, checks what was served.

Exits with 0 if all is well, 1 if the self-check fails or something was compiled while
serving, 2 if the demo could not do what was asked.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from jrope.demo.engine import CompileCounter, Engine
from jrope.demo.faults import FAULTS, Fault, FaultError, RopeConfigs
from jrope.demo.figures import (
    Figures,
    Memory,
    Seconds,
    make_figures,
    peak_resident_bytes,
)
from jrope.demo.gguf_file import GgufError
from jrope.demo.media import grid_starts
from jrope.demo.model import Decoder
from jrope.demo.options import PAGE_SIZE, Options, parse_options
from jrope.demo.paged_cache import PageBook
from jrope.demo.prompts import make_requests
from jrope.demo.report import Report, Stage
from jrope.demo.requests import Request, RequestError, check_requests
from jrope.demo.scheduler import Scheduler, Totals
from jrope.demo.selfcheck import GoldenResult, SelfCheck, ServedResult
from jrope.demo.sources import SOURCES, Parts
from jrope.demo.tokenizer import Tokenizer
from jrope.demo.weights import CHECKPOINTS, WeightsError
from jrope.positions import BatchPositions, PositionSpec

_SPARE_PAGES = 32  # for prefixes that nobody uses at the moment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model and what it will be asked."""

    model: Decoder
    tokenizer: Tokenizer
    positions: PositionSpec
    requests: list[Request]


def load(options: Options, fault: Fault, stage: Stage) -> Loaded:
    """Reads the weights, builds the model, prepares the requests."""
    source = SOURCES[options.model]
    parts = source.read(options.gguf, stage.advance)
    configs = fault.change_configs(parts.spec.rope_configs())
    requests = make_requests(options.model, parts.tokenizer, options.prompts)
    if options.context > (most := parts.spec.context):
        raise RequestError(f"--context must be at most the model's {most}")
    check_requests(requests, context=options.context, new_tokens=options.new_tokens)
    model = _build(parts, configs, stage)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    stage.note = f"{numbers / 1e6:.3g} million weights, {source.origin}"
    return Loaded(
        model=model,
        tokenizer=parts.tokenizer,
        positions=parts.positions,
        requests=requests,
    )


def _build(parts: Parts, configs: RopeConfigs, stage: Stage) -> Decoder:
    done = iter(range(1, parts.tensors + 1))

    def fetch(name: str):
        stage.advance(next(done), parts.tensors, "unpacking the weights")
        return parts.fetch(name)

    return Decoder(fetch, parts.spec, configs)


def compile_steps(engine: Engine, loaded: Loaded, stage: Stage) -> None:
    """Compiles everything that serving will run, on the device and on the host."""
    stage.advance(0, len(engine.shapes), "positions")
    _compile_positions(loaded)
    for done, (name, shape) in enumerate(engine.shapes.items()):
        stage.advance(done, len(engine.shapes), f"{name} {list(shape)}")
        engine.compile(name)
    shapes = (f"{name} {list(shape)}" for name, shape in engine.shapes.items())
    stage.note = f"{engine.programs} programs: " + ", ".join(shapes)


def _compile_positions(loaded: Loaded) -> None:
    """Has numba compile what the positions of these requests need, and no more."""
    for request in loaded.requests:
        request.make_plan(loaded.positions)
        grid_starts(request.plan, request.media, 0, 1)
    batch = BatchPositions(loaded.positions, 1, max_tokens=1, max_position=1)
    batch.step(*np.zeros((3, 0), np.int32))


def check(
    options: Options, loaded: Loaded, stage: Stage
) -> tuple[GoldenResult | None, list[ServedResult]]:
    """Compares with golden logits, if any, and with one pass over each sequence."""
    checker, requests = SelfCheck(loaded.model), loaded.requests
    golden = None
    if options.model in CHECKPOINTS:
        stage.advance(0, len(requests) + 1, "golden logits")
        golden = checker.golden(options.model, loaded.tokenizer)
    redone: list[ServedResult] = []
    for done, request in enumerate(requests):
        stage.advance(
            done + 1, len(requests) + 1, f"request {request.name} in one pass"
        )
        redone.append(checker.served(request))
    stage.note = f"{len(requests)} sequences again, each in one pass"
    return golden, redone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What serving left behind, besides the requests."""

    totals: Totals
    recompiles: int
    seconds: float


def serve(
    options: Options, loaded: Loaded, engine: Engine, fault: Fault, report: Report
) -> Served:
    """Serves all requests to their end.

    Raises:
      FaultError: if something was to be broken, but there was no occasion.
    """
    scheduler = Scheduler(
        engine,
        PageBook(engine.pages, PAGE_SIZE),
        loaded.requests,
        new_tokens=options.new_tokens,
        stop=loaded.tokenizer.stop,
        positions=loaded.positions,
        fault=fault,
    )
    start = time.perf_counter()
    with (
        CompileCounter() as compiles,
        report.serving(
            scheduler.slots, len(loaded.requests), loaded.tokenizer
        ) as stream,
    ):
        scheduler.run(stream.on_progress)
    seconds = time.perf_counter() - start
    note = f"{len(loaded.requests)} requests in {options.slots} slots"
    report.over("serve", seconds, note)
    if options.fault and not fault.happened:
        raise FaultError(fault.hint)
    return Served(totals=scheduler.totals, recompiles=compiles.count, seconds=seconds)


def run(options: Options, report: Report) -> Figures:
    """Does all of it.

    Raises:
      WeightsError, GgufError: if the weights cannot be had.
      RequestError, FaultError: if what was asked for cannot be done.
    """
    start = time.perf_counter()
    fault = FAULTS[options.fault]() if options.fault else Fault()
    report.opening(SOURCES[options.model], options.fault)
    with report.stage("load") as loading:
        loaded = load(options, fault, loading)
    with report.stage("compile") as compiling:
        engine = _make_engine(options, loaded.model)
        compile_steps(engine, loaded, compiling)
    served = serve(options, loaded, engine, fault, report)
    with report.stage("check") as checking:
        golden, redone = check(options, loaded, checking)
    figures = make_figures(
        model=options.model,
        broken=options.fault,
        golden=golden,
        redone=redone,
        programs=engine.programs,
        recompiles=served.recompiles,
        requests=loaded.requests,
        totals=served.totals,
        memory=_memory(loaded.model, engine),
        seconds=Seconds(
            load=loading.seconds,
            compile=compiling.seconds,
            serve=served.seconds,
            check=checking.seconds,
            total=time.perf_counter() - start,
        ),
    )
    report.closing(figures, loaded.requests, redone)
    return figures


def _make_engine(options: Options, model: Decoder) -> Engine:
    return Engine(
        model,
        slots=options.slots,
        chunk=options.chunk,
        pages=options.slots * (options.context // PAGE_SIZE) + _SPARE_PAGES,
        page_size=PAGE_SIZE,
        context=options.context,
    )


def _memory(model: Decoder, engine: Engine) -> Memory:
    weights = nnx.state(model, nnx.Param)
    tables = nnx.state(model, nnx.Not(nnx.Param))
    return Memory(
        weights=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        rope_tables=sum(leaf.nbytes for leaf in jax.tree.leaves(tables)),
        page_pool=engine.pool_bytes,
        peak_resident=peak_resident_bytes(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns what the process exits with."""
    options = parse_options(arguments)
    # Figures go to stdout; with --json all else goes out of their way.
    report = Report(Console(stderr=options.json, highlight=False))
    try:
        # On GPUs and TPUs float32 products are rounded to less unless told not to be.
        with jax.default_matmul_precision("highest"):
            figures = run(options, report)
    except (WeightsError, GgufError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FaultError as error:
        print(f"error: --break {options.fault} cannot show: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(figures.to_json())
    return 0 if figures.ok else 1


if __name__ == "__main__":
    sys.exit(main())
