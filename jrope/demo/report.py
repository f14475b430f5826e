"""What a person sees: progress, the texts as they come, and a table at the end."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import jax
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from jrope.demo.figures import Figures
from jrope.demo.requests import Request
from jrope.demo.selfcheck import ServedResult
from jrope.demo.sources import Source
from jrope.demo.tokenizer import Tokenizer

_MIB = 1 << 20
_QUESTION_LENGTH = 44  # of a question at the most: it shares a line with two numbers


class Stage:
    """One stage under way.

    Attributes:
      note: what is said about it when it is over.
      seconds: how long it took, once it is over.
    """

    def __init__(self, progress: Progress, task: TaskID) -> None:
        """Belongs to a bar on the screen."""
        self.note = ""
        self.seconds = 0.0
        self._progress, self._task = progress, task

    def advance(self, done: int, total: int, doing: str) -> None:
        """Moves the bar."""
        self._progress.update(
            self._task, completed=done, total=total, description=doing
        )


class Report:
    """Writes to a console; what moves is left out where nobody can see it move.

    Args:
      console: where to.
    """

    def __init__(self, console: Console) -> None:
        """Writes nothing yet."""
        self._console = console

    def opening(self, source: Source, broken: str | None) -> None:
        """Says what is about to run."""
        versions = f"jax {jax.__version__}, {jax.default_backend()}"
        self._console.print(
            Text.assemble(
                ("jrope demo", "bold"), f"  {source.title}  ", (versions, "dim")
            )
        )
        self._console.print(Text(f"weights: {source.weights}", "dim"))
        if broken:
            self._console.print(
                Text(f"Broken on purpose: {broken}. The check must fail.", "bold red")
            )

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Shows a bar while a stage runs, and one line when it is over."""
        start = time.perf_counter()
        progress = Progress(
            SpinnerColumn(),
            TextColumn(f"{name:8}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", style="dim"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        with progress:
            stage = Stage(progress, progress.add_task("", total=None))
            yield stage
        stage.seconds = time.perf_counter() - start
        self.over(name, stage.seconds, stage.note)

    @contextlib.contextmanager
    def serving(
        self, slots: Sequence[Request | None], requests: int, tokenizer: Tokenizer
    ) -> Iterator["Stream"]:
        """Shows the texts as they come.

        Args:
          slots: the scheduler's, which it changes as it goes.
          requests: how many there are in all.
          tokenizer: makes texts of tokens.
        """
        live = Live(console=self._console, transient=True, auto_refresh=False)
        stream = Stream(self._console, live, slots, requests, tokenizer)
        with live if self._console.is_terminal else contextlib.nullcontext():
            yield stream

    def over(self, name: str, seconds: float, note: str) -> None:
        """Says that a stage is over."""
        self._console.print(
            Text.assemble(("done ", "green"), f"{name:8}{seconds:6.1f} s  ", note)
        )

    def closing(
        self,
        figures: Figures,
        requests: Sequence[Request],
        served: Sequence[ServedResult],
    ) -> None:
        """Shows the tables and the verdict."""
        self._console.print(_request_table(requests, served))
        self._console.print(_figure_table(figures))
        self._console.print(_verdict(figures))


class Stream:
    """The answers under way, one line a slot, and the finished ones above them."""

    def __init__(
        self,
        console: Console,
        live: Live,
        slots: Sequence[Request | None],
        requests: int,
        tokenizer: Tokenizer,
    ) -> None:
        """Shows nothing yet."""
        self._console, self._live, self._slots = console, live, slots
        self._requests, self._finished = requests, 0
        self._tokenizer = tokenizer

    def on_progress(self, request: Request) -> None:
        """Shows where every answer is, now that one has moved on."""
        if request.finished:
            self._finished += 1
            self._print_finished(request)
        if self._console.is_terminal:
            head = Text(f"serve   {self._finished} of {self._requests} answered", "dim")
            lines = [self._line(slot) for slot in self._slots]
            self._live.update(Group(head, *lines), refresh=True)

    def _line(self, request: Request | None) -> Text:
        if request is None:
            return Text("   -", "dim")
        if not request.output:
            done = f"reading {request.computed} of {len(request.prompt)} tokens"
            return Text(f"{request.name:4}  {done}", "dim", no_wrap=True)
        answer = self._tokenizer.decode(request.output)
        room = max(self._console.width - 8, 8)
        shown = " ".join(answer.split())[-room:]
        return Text(f"{request.name:4}  {shown}", no_wrap=True)

    def _print_finished(self, request: Request) -> None:
        question = " ".join(request.text.split())
        if len(question) > _QUESTION_LENGTH:
            tail = question[-_QUESTION_LENGTH:]
            question = f"... {tail.partition(' ')[2] or tail}"
        found = f", {request.hit_tokens} cached" if request.hit_tokens else ""
        head = f"({len(request.prompt)} tokens{found})"
        self._console.print(
            Text.assemble(
                f"{request.name:4}  ", (question, "cyan"), (f"  {head}", "dim")
            )
        )
        lines = self._tokenizer.decode(request.output).rstrip().splitlines()
        answer = "\n".join(line for line in lines if line.strip())
        if request.output[-1] not in self._tokenizer.stop:
            answer += " ..."  # Cut off: the model had more to say.
        self._console.print(Padding(Text(answer), (0, 0, 0, 6), expand=False))


def _request_table(
    requests: Sequence[Request], served: Sequence[ServedResult]
) -> Table:
    table = Table(title="Requests", title_justify="left", box=None, pad_edge=False)
    for head in (
        "no.",
        "prompt\ntokens",
        "of them\ncached",
        "queue\ns",
        "first\ntoken s",
        "ms a\ntoken",
        "tokens as\nin one pass",
        "largest logit\ndifference",
    ):
        table.add_column(head, justify="right")
    for request, check in zip(requests, served, strict=True):
        later = max(len(request.output) - 1, 1)
        table.add_row(
            str(request.name),
            str(len(request.prompt)),
            str(request.hit_tokens),
            f"{request.admitted - request.arrived:.2f}",
            f"{request.first_token - request.admitted:.2f}",
            f"{(request.finished - request.first_token) / later * 1e3:.0f}",
            f"{check.agreeing}/{check.tokens}",
            Text(f"{check.difference:.1e}", "" if check.ok else "bold red"),
        )
    return table


def _figure_table(figures: Figures) -> Table:
    memory, seconds = figures.memory, figures.seconds
    peak = f", peak {memory.peak_resident / _MIB:.0f}" if memory.peak_resident else ""
    table = Table(title="\nFigures", title_justify="left", box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in (
        ("prefill", f"{figures.prefill_tokens_per_second:.0f} tokens/s"),
        (
            "decode",
            f"{figures.decode_tokens_per_second:.0f} tokens/s, "
            f"{figures.mean_decode_batch:.1f} sequences a step",
        ),
        (
            "first token",
            f"{_seconds(figures.seconds_to_first_token_without_hit)} without, "
            f"{_seconds(figures.seconds_to_first_token_with_hit)} with a prefix hit "
            "(long prompts, once in a slot)",
        ),
        ("queue", f"{figures.median_queue_seconds:.2f} s (median)"),
        (
            "prefix cache",
            f"{figures.prefix_hit_tokens} of {figures.prompt_tokens} prompt tokens "
            f"({figures.prefix_hit_rate:.0%})",
        ),
        *_media(figures),
        (
            "programs",
            f"{figures.programs}, compiled while serving: "
            f"{figures.recompiles_after_warmup}",
        ),
        (
            "memory, MiB",
            f"weights {memory.weights / _MIB:.0f}, rotary tables "
            f"{memory.rope_tables / _MIB:.0f}, page pool "
            f"{memory.page_pool / _MIB:.0f}{peak}",
        ),
        (
            "seconds",
            f"load {seconds.load:.1f}, compile {seconds.compile:.1f}, serve "
            f"{seconds.serve:.1f}, check {seconds.check:.1f}, in all "
            f"{seconds.total:.1f}",
        ),
    ):
        table.add_row(name, value)
    return table


def _media(figures: Figures) -> list[tuple[str, str]]:
    """A line for models that take any."""
    if not figures.media_tokens:
        return []
    shown = (
        f"{figures.images} images, {figures.videos} videos, {figures.distinct_grids} "
        f"grids, {figures.media_tokens} tokens; a chunk or a hit ended inside one "
        f"{figures.media_cuts} times"
    )
    return [("pictures", shown)]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _golden(figures: Figures) -> str:
    if figures.golden_logit_difference is None:
        return "golden logits: none, since these weights are published nowhere"
    return (
        f"golden logits of transformers: {figures.golden_argmax_equal} of "
        f"{figures.golden_tokens} tokens equal, largest difference "
        f"{figures.golden_logit_difference:.1e}"
    )


def _verdict(figures: Figures) -> Panel:
    lines = (
        f"{_golden(figures)}\n"
        f"served against one pass: {figures.served_tokens_agreeing} of "
        f"{figures.served_tokens} tokens agree, largest difference "
        f"{figures.worst_logit_difference:.1e}\n"
        f"allowed: {figures.tolerance:.0e}"
    )
    verdict = f"self-check {figures.self_check}"
    if figures.broken:
        verdict += f" (broken on purpose: {figures.broken})"
    colour = "green" if figures.ok else "red"
    return Panel(lines, title=verdict, border_style=colour, title_align="left")
