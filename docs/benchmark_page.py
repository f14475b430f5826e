"""The page of benchmarks, made from the files in benchmarks/results.

Every file gets a section. What a section says and how its table looks is a row of
`SECTIONS`; a file without one is shown as it is, number by number. Over 400 lines, as
a third of them are that table.
"""

import dataclasses
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Results = Mapping[str, Any]

_HEAD = """# Benchmarks

This page is made from the files in `benchmarks/results` when the site is built: no
number is written by hand. Under each table stands the command that makes its file
again, and the machine on which it ran.

Ratios compare what ran in turn within one program, so they travel between machines;
microseconds do not. How each is measured stands in `benchmarks/README.md`.
"""

# Where the site has the picture of a file with results.
PICTURE = "pictures/bench_{name}.svg"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """What the page says of results files of one kind.

    Args:
      files: pattern of their names, without the ending.
      title: of the section.
      says: what was asked, and how to read the table.
      command: makes such a file; `{file}` stands for its path, `{name}` for its name.
      table: makes the table.
      picture: what its picture shows, which `benchmark_pictures.py` draws; "" for none.
      misses: whether its rows say which goals they miss; the reasons stand beside the
        file, in `NAME-misses.md`.
    """

    files: str
    title: str
    says: str
    command: str
    table: Callable[[Results], str]
    picture: str = ""
    misses: bool = False


def make_page(folder: Path) -> str:
    """The page, in Markdown.

    Args:
      folder: with the results files.

    Raises:
      ValueError: if a file is not what its section expects.
    """
    paths = sorted(folder.glob("*.json"), key=lambda path: (_place(path), path.stem))
    return "\n".join([_HEAD, *map(_section, paths)])


def _place(path: Path) -> int:
    """Which section a file is shown in; one past the last for files without one."""
    fits = (fnmatch.fnmatch(path.stem, section.files) for section in SECTIONS)
    return next((i for i, fit in enumerate(fits) if fit), len(SECTIONS))


def _section(path: Path) -> str:
    results = json.loads(path.read_text(encoding="utf-8"))
    place = _place(path)
    section = SECTIONS[place] if place < len(SECTIONS) else _unknown(path.stem)
    try:
        table = section.table(results)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path.name} must have what the section {section.title!r} shows, got "
            f"{error!r}; was the benchmark changed and docs/benchmark_page.py not?"
        ) from error
    command = section.command.format(
        file=f"benchmarks/results/{path.name}", name=path.stem
    )
    versions = results.get("stamp", {}).get("versions", {})
    title = section.title.format(jax=versions.get("jax", ""))
    return "\n".join(
        [
            f"## {title}",
            f"\n{section.says}\n",
            *_picture(section, path.stem),
            table,
            f"\n```sh\n{command}\n```",
            f"\n{_stamps(results)}\n",
            *([_misses(results), _reasons(path)] if section.misses else []),
        ]
    )


def _picture(section: Section, stem: str) -> list[str]:
    if not section.picture:
        return []
    return [f"![{section.picture}]({PICTURE.format(name=stem)})\n"]


def _misses(results: Results) -> str:
    """What runs in each case that misses a goal, and in the best form there."""
    found = []
    for cell in results["cells"]:
        if not cell["misses"]:
            continue
        case = [f"T={cell['tokens']}", cell["dtype"], cell["pairing"], cell["mode"]]
        goals = "; ".join(cell["misses"])
        found.append(f'??? note "{", ".join(case)}, JAX {cell["jax"]}: {goals}"')
        for name, lines in cell["hlo"].items():
            found += ["", f"    {name}", "    ```", *(f"    {it}" for it in lines)]
            found += ["    ```"]
        found.append("")
    return "\n".join(found)


def _reasons(path: Path) -> str:
    """The page beside a file with results, as a part of this one."""
    page = path.with_name(f"{path.stem}-misses.md").read_text(encoding="utf-8")
    return re.sub(r"^#", "###", page, flags=re.MULTILINE)


def _unknown(stem: str) -> Section:
    return Section(
        files=stem,
        title=stem.replace("_", " ").capitalize(),
        says="No section of its own yet: the numbers as they are in the file.",
        command=f"python -m benchmarks.bench_{stem} --json > {{file}}",
        table=plain_tables,
    )


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers are aligned to the right by their heads' colon."""
    found = [[_text(cell) for cell in row] for row in rows]
    rule = [
        "---:" if all(_is_number(row[i]) for row in found) else "---"
        for i in range(len(heads))
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, rule, *found])


def plain_tables(results: Results) -> str:
    """Whatever is in a file: single numbers, then a table for each list of rows."""
    single = {key: value for key, value in results.items() if _is_plain(value)}
    lists = {
        key.replace("_", " "): _plain_rows(value)
        for key, value in results.items()
        if key not in (*single, "stamp", "stamps", "sources")
    }
    parts = [markdown_table(["", "value"], single.items())] if single else []
    for title, table in lists.items():
        parts += [f"**{title}**", table] if len(lists) > 1 else [table]
    return "\n\n".join(parts)


def _plain_rows(value: Any) -> str:
    """A table of a list of objects, or of one object."""
    if isinstance(value, Mapping):
        return markdown_table(["", "value"], _flat(value).items())
    rows = [_flat(row) if isinstance(row, Mapping) else {"": row} for row in value]
    heads = list(dict.fromkeys(key for row in rows for key in row))
    return markdown_table(heads, [[row.get(key, "") for key in heads] for row in rows])


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """An object's numbers and words, those of objects within by joined names."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}: ")
        else:
            found[name] = ", ".join(map(_text, value)) if _is_list(value) else value
    return found


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_plain(value: object) -> bool:
    return not isinstance(value, list | tuple | Mapping)


def _text(cell: object) -> str:
    if isinstance(cell, bool) or cell is None:
        return {True: "yes", False: "no", None: ""}[cell]
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell).replace("|", "\\|")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d,.]+(e[-+]\d+)?x?", text) is not None


def _stamps(results: Results) -> str:
    """A line for each machine, or JAX, that the numbers are from."""
    single = [results["stamp"]] if "stamp" in results else []
    stamps = [*results.get("stamps", {}).values(), *single]
    if not stamps:
        return "*No stamp: the machine is not known.*"
    return "\n\n".join(map(_stamp, stamps))


def _stamp(stamp: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {it}" for name, it in stamp["versions"].items())
    return (
        f"*{stamp['cpu']}, {stamp['cores']} of its cores, load {stamp['load']:.1f} "
        f"when it began; {versions}.*"
    )


def _forms(results: Results) -> str:
    rows = [
        [
            cell["tokens"],
            cell["dtype"],
            "NeoX" if cell["is_neox_style"] else "GPT-J",
            "half" if cell["partial"] else "whole",
            f"`{cell['chosen']}`",
            cell["cost"][cell["chosen"]],
            f"`{min(cell['cost'], key=cell['cost'].__getitem__)}`",
            max(cell["cost"].values()),
        ]
        for cell in results["cells"]
    ]
    heads = [
        "T",
        "dtype",
        "pairing",
        "rotated",
        "chosen",
        "its cost",
        "best",
        "worst cost",
    ]
    return markdown_table(heads, rows)


def _positions(results: Results) -> str:
    heads = [
        "prompt",
        "tokens",
        "call, us",
        "vLLM's rule over it",
        "transformers over it",
    ]
    heads += ["prepared plan over a plain fill"]
    calls = [
        [
            case["name"],
            case["tokens"],
            case["times"]["call"]["median_us"],
            f"{case['call_over_vllm_rule']:.1f}x",
            f"{case['call_over_transformers']:.0f}x"
            if "call_over_transformers" in case
            else "",
            f"{case['engine_over_floor']:.2f}x",
        ]
        for case in results["cases"]
    ]
    steps = [
        [
            step["requests"],
            step["kind"],
            step["times"]["step"]["median_us"],
            f"{step['step_over_loop']:.0f}x",
        ]
        for step in results["steps"]
    ]
    step_heads = ["requests", "kind", "step, us", "a loop of requests over it"]
    return f"{markdown_table(heads, calls)}\n\n{markdown_table(step_heads, steps)}"


def _rope(results: Results) -> str:
    heads = [
        "jax",
        "T",
        "dtype",
        "pairing",
        "mode",
        "us",
        "over best form",
        "best form",
    ]
    heads += ["over floor", "fastest peer", "slowest peer"]
    rows = []
    for cell in results["cells"]:
        peers = sorted(cell["peers"].items(), key=lambda pair: pair[1])
        ends = [f"{name} {ratio:.3g}x" for name, ratio in (peers[0], peers[-1])]
        rows.append(
            [cell[key] for key in ("jax", "tokens", "dtype", "pairing", "mode")]
            + [cell["median_us"]["jrope"], f"{cell['over_best_form']:.2f}x"]
            + [f"`{cell['best_form'].removeprefix('form: ')}`"]
            + [f"{cell['over_copy']:.2f}x", *ends]
        )
    return markdown_table(heads, rows)


SECTIONS = (
    Section(
        files="rope",
        title="The rotation beside other projects",
        says="A whole step, from positions to turned heads, for 32 query and 8 key "
        "heads of 128 features. *mode*: one call, or inside one program over "
        "advancing positions, as a server runs it. Every candidate's values are "
        "checked before it is timed. A peer's number is its time over jrope's.",
        command="make bench ARGS={name}",
        table=_rope,
        misses=True,
        picture="Each peer's time over jrope's: right of 1 is slower",
    ),
    Section(
        files="forms-quick",
        title="Ways to write the rotation, in a minute",
        says="As the following, for one token and 256 in float32 and bfloat16 alone.",
        command="make bench ARGS={name}",
        table=_forms,
    ),
    Section(
        files="forms*",
        title="Ways to write the rotation, jax {jax}",
        says="Which formulation XLA:CPU runs fastest. *cost*: the time over that of "
        "the best form, for a call and a step in a loop together (geometric "
        "mean); *chosen* is what `jrope.rotate` uses there.",
        command="python -m benchmarks.bench_forms --json > {file}",
        table=_forms,
    ),
    Section(
        files="positions",
        title="Positions on the host",
        says="A call plans a prompt, checks it and writes its positions. *vLLM's "
        "rule* is its Python, written again; *transformers* its own "
        "`get_rope_index`. A step fills the positions of a whole batch.",
        command="make bench ARGS={name}",
        table=_positions,
    ),
    Section(
        files="positions-peers",
        title="Positions on the host, beside transformers",
        says="The same on Python 3.11, where torch and transformers are installed "
        "besides (the extra `peers`).",
        command="python -m benchmarks.bench_positions --json > {file}",
        table=_positions,
    ),
    Section(
        files="precision",
        title="How exact tables are",
        says="The worst error of cos and sin in the upper half of each length, against "
        "60-digit arithmetic: flat and two-level tables of exact angles, and float32 "
        "angles.",
        command="make bench ARGS={name}",
        table=plain_tables,
    ),
    Section(
        files="recompile",
        title="What compiles again",
        says="Programs compiled while the context grows, with jrope and with forms "
        "that cut their table to its length.",
        command="make bench ARGS={name}",
        table=plain_tables,
        picture="Programs compiled while the context grows",
    ),
    Section(
        files="decode_step",
        title="A decode step, host and device",
        says="From the positions of all requests to a step of a twelve-layer "
        "attention stack.",
        command="make bench ARGS={name}",
        table=plain_tables,
        picture="What share of a decode step the host and the rotation take",
    ),
    Section(
        files="train",
        title="A training step",
        says="Time of a step, and bytes kept for the backward pass, of a "
        "twelve-layer attention stack with jrope and with other forms.",
        command="make bench ARGS={name}",
        table=plain_tables,
    ),
    Section(
        files="inplace",
        title="Heads turned in place on CPU",
        says="The route `cpu_inplace` beside XLA's, and beside the floor of any "
        "elementwise operation: one step of a loop, a call whose operands are "
        "donated, and one that keeps them.",
        command="make bench ARGS={name}",
        table=plain_tables,
    ),
    Section(
        files="soak-jax*",
        title="A million calls of `cpu_inplace`",
        says="Random calls against the definition: elements whose bits differ, those "
        "past the error bound, and memory before and after.",
        command="python -m benchmarks.soak_cpu_inplace --json > {file}",
        table=plain_tables,
    ),
)
