"""How error messages show what came."""

import reprlib
from typing import Any

# A number of more bits is no size and no factor; a longer text is not read by anyone.
_LONGEST_INT, _LONGEST_TEXT, _MOST_ENTRIES, _DEEPEST = 256, 120, 24, 4


class _Shortened(reprlib.Repr):
    """`repr` that ends, whatever a config.json holds."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = _DEEPEST
        self.maxstring = self.maxother = _LONGEST_TEXT
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _MOST_ENTRIES

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write out ints of some thousand digits."""
        del level
        bits = x.bit_length()
        return f"an int of {bits} bits" if bits > _LONGEST_INT else repr(x)


_SHORTENED = _Shortened()


def show(value: Any) -> str:
    """A value's `repr`, cut where it is long, large or deeply nested.

    >>> show({"factor": 8.0}), show("a" * 1000)[-3:], show(10**5000)
    ("{'factor': 8.0}", "aa'", 'an int of 16610 bits')
    """
    return _SHORTENED.repr(value)
