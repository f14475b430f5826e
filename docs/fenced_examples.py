"""Shows examples in docstrings as code, where Markdown would take `>>>` for quotes."""

import re
from typing import Any

import griffe

# An example is a paragraph that begins with a prompt.
_EXAMPLE = re.compile(r"(?:^|(?<=\n\n))>>> .*?(?=\n\n|\Z)", flags=re.DOTALL)


class FencedExamples(griffe.Extension):
    """Puts fences round examples, before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of a module, class or function."""
        del kwargs
        _fence(obj)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """The outermost module, which is no object of another."""
        del kwargs
        _fence(pkg)


def _fence(obj: griffe.Object) -> None:
    if obj.docstring:
        obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    return f"```pycon\n{example[0].rstrip()}\n```"
