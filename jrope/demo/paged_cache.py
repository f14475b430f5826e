"""Keeps the books of the page pool: who uses a page, and which prompts it can serve.

Pure host code. A page is in exactly one state: free (nothing worth keeping in it), used
(by one or more requests), or idle (used by nobody, but a known prefix of a prompt is in
it, so that the next request that begins alike need not compute it). When no page is
free, the idle page that has waited longest is given away.
"""

import collections
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np


class OutOfPagesError(RuntimeError):
    """Every page is in use."""


class PageBook:
    """Free list, reference counts and prefix table of a pool of pages.

    Args:
      pages: in the pool.
      page_size: tokens a page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        """Starts with every page free."""
        self.pages = pages
        self.page_size = page_size
        self._free = collections.deque(range(pages))
        self._users = [0] * pages
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._page_of: dict[bytes, int] = {}  # digest of a prefix -> its last page
        self._digest_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that `take` can still give."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """A page for one request to write, from the free or else the oldest idle ones.

        Raises:
          OutOfPagesError: if every page is in use.
        """
        if not self.available:
            raise OutOfPagesError(f"all {self.pages} pages are in use")
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
        self._users[page] = 1
        return page

    def match(self, prompt: Sequence[int]) -> list[int]:
        """Takes the pages that hold the longest known prefix of a prompt.

        At least one token is left to compute: its logits are wanted.
        """
        found: list[int] = []
        for digest in self._digests(prompt[:-1]):
            if (page := self._page_of.get(digest)) is None:
                break
            self._users[page] += 1
            self._idle.pop(page, None)
            found.append(page)
        return found

    def publish(self, prompt: Sequence[int], pages: Sequence[int]) -> None:
        """Makes the full pages of a computed prefix known.

        Args:
          prompt: the tokens computed so far.
          pages: of the request, in order. Where another page already holds the same
            prefix, that one stays known.
        """
        for digest, page in zip(self._digests(prompt), pages, strict=False):
            if digest not in self._page_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Gives a request's pages back.

        The last page goes idle first, so that a prefix is lost from its end: its
        beginning is of use without the rest, the rest is not without the beginning.
        """
        for page in reversed(pages):
            if self._users[page] < 1:
                raise ValueError(f"page {page} is released but nobody uses it")
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._digest_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _digests(self, tokens: Sequence[int]) -> Iterable[bytes]:
        """One digest per full page, of all tokens from the first to the page's last."""
        running = hashlib.blake2b(digest_size=16)
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = np.asarray(tokens[start : start + self.page_size], np.int64)
            running.update(page.tobytes())
            yield running.digest()
