"""Mutants of a source file: each differs from it in one operator, number or keyword.

cosmic-ray finds the places and makes the changes. What cannot matter by rule is left
out: see `_ranges_left_out`. A place has up to a dozen mutants; a draw takes one of each
drawn place, so that arithmetic does not outweigh all else.
"""

import ast
import dataclasses
import functools
import importlib
import pathlib
import random
from collections.abc import Iterator
from typing import Any

Position = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file.

    Args:
      path: of the file, from the project's folder.
      operator: cosmic-ray's name of the change.
      occurrence: which of the operator's places in the file.
      start: line from 1 and column from 0.
      end: where the changed text ends.
    """

    path: str
    operator: str
    occurrence: int
    start: Position
    end: Position

    @property
    def name(self) -> str:
        """What `--only` takes."""
        kind = self.operator.removeprefix("core/")
        return f"{self.path}:{self.start[0]}:{self.start[1]}:{kind}:{self.occurrence}"


def made(mutant: Mutant, source: str) -> str:
    """The file's text with the change."""
    operator = _part("plugins").get_operator(mutant.operator)()
    text = _part("mutating").mutate_code(source, operator, mutant.occurrence)
    assert text is not None, mutant
    return text


def mutants_of(root: pathlib.Path, path: str) -> list[Mutant]:
    """All mutants of a file that could matter."""
    source = (root / path).read_text()
    left_out = _ranges_left_out(ast.parse(source))
    return [
        mutant
        for mutant in _population(path, source)
        if not any(start <= mutant.start < end for start, end in left_out)
    ]


def drawn(root: pathlib.Path, paths: list[str], count: int, seed: str) -> list[Mutant]:
    """One mutant of each of `count` places drawn at random; few are the first of many.

    Mutants that do not compile, or whose program is the same tree, are drawn again.
    """
    places: dict[tuple[str, Position, str], list[Mutant]] = {}
    for path in paths:
        for mutant in mutants_of(root, path):
            kind = mutant.operator.partition("_")[0]
            places.setdefault((path, mutant.start, kind), []).append(mutant)
    chosen = random.Random(seed)
    order = sorted(places)
    chosen.shuffle(order)
    found: list[Mutant] = []
    for place in order:
        candidates = places[place]
        chosen.shuffle(candidates)
        found += [mutant for mutant in candidates if _differs(root, mutant)][:1]
        if len(found) == count:
            break
    return found


def _differs(root: pathlib.Path, mutant: Mutant) -> bool:
    source = (root / mutant.path).read_text()
    try:
        changed = ast.parse(made(mutant, source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def _population(path: str, source: str) -> Iterator[Mutant]:
    trees = _part("ast")
    nodes = list(trees.ast_nodes(trees.get_ast(source)))
    for name, operator in _operators():
        occurrence = 0
        for node in nodes:
            for start, end in operator.mutation_positions(node):
                yield Mutant(
                    path=path,
                    operator=name,
                    occurrence=occurrence,
                    start=start,
                    end=end,
                )
                occurrence += 1


def _part(name: str) -> Any:
    """A module of cosmic-ray, which only `make mutants` installs."""
    return importlib.import_module(f"cosmic_ray.{name}")


@functools.cache
def _operators() -> list[tuple[str, Any]]:
    """All operators that need no arguments of their own."""
    plugins = _part("plugins")
    classes = [(name, plugins.get_operator(name)) for name in plugins.operator_names()]
    return sorted((name, kind()) for name, kind in classes if not kind.arguments())


def _ranges_left_out(tree: ast.Module) -> list[tuple[Position, Position]]:
    """Where a change cannot make the program wrong.

    - Annotations and aliases of types: `X | None` is an operator to cosmic-ray.
    - f-strings: the words of messages and names.
    - `examples` of a scaling: what tests start from, not what is tested.
    """
    ranges = []
    for node in ast.walk(tree):
        held: list[ast.expr | None] = []
        if isinstance(node, ast.arg):
            held = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            held = [node.returns]
        elif isinstance(node, ast.AnnAssign):
            held = [node.annotation]
        elif isinstance(node, ast.JoinedStr):
            held = [node]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            is_alias = name[0].isupper() and not name.isupper()
            held = [node.value] if is_alias or name == "examples" else []
        ranges += [_range(part) for part in held if part is not None]
    return ranges


def _range(node: ast.expr) -> tuple[Position, Position]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
