"""Text to token ids and back, from the GGUF file's own metadata."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2.sandbox
import tokenizers

_CONTROL, _BYTE = 3, 6  # ggml's token types
_SPACE = "\u2581"  # what SentencePiece writes for a space


class Tokenizer(Protocol):
    """What the demo needs of a tokenizer.

    Attributes:
      stop: ids that end an answer.
    """

    stop: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Ids of the text, with the mark of the beginning if the model wants it."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of what the model is shown when a person says `text`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out."""
        ...


def make_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Raises:
      ValueError: if it is of a kind that the demo does not know.
    """
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        return BytePairTokenizer(metadata)
    if kind == "llama":
        return ScoredTokenizer(metadata)
    raise ValueError(f"tokenizer.ggml.model must be 'gpt2' or 'llama', got {kind!r}")


class BytePairTokenizer:
    """GPT-2's byte pairs with a list of merges, and a chat template (SmolLM2)."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Builds the tokenizer and the template."""
        if (split := metadata["tokenizer.ggml.pre"]) != "smollm":
            raise ValueError(f"tokenizer.ggml.pre must be 'smollm', got {split!r}")
        words: list[str] = metadata["tokenizer.ggml.tokens"]
        types: list[int] = metadata["tokenizer.ggml.token_type"]
        self.stop = frozenset({metadata["tokenizer.ggml.eos_token_id"]})
        self._tokenizer = _byte_pairs(words, metadata["tokenizer.ggml.merges"])
        self._tokenizer.add_special_tokens(
            [word for word, kind in zip(words, types, strict=True) if kind == _CONTROL]
        )
        # The template comes with the weights, so it runs without access to Python.
        sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        self._template = sandbox.from_string(metadata["tokenizer.chat_template"])

    def encode(self, text: str) -> list[int]:
        """Ids of the text as it stands."""
        return self._tokenizer.encode(text).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a conversation that `text` opens."""
        messages = [{"role": "user", "content": text}]
        return self.encode(
            self._template.render(messages=messages, add_generation_prompt=True)
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _byte_pairs(words: Sequence[str], merges: Sequence[str]) -> tokenizers.Tokenizer:
    left_right = [(left, right) for left, right in (m.split(" ") for m in merges)]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={word: index for index, word in enumerate(words)}, merges=left_right
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    return made


class ScoredTokenizer:
    """SentencePiece's byte pairs, merged by score, bytes as the last resort (Gemma).

    Source: Kudo and Richardson 2018, arXiv:1808.06226; llama.cpp's `llm_tokenizer_spm`
    is the form that GGUF files are written for.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Keeps the words with their scores."""
        self._words: list[str] = metadata["tokenizer.ggml.tokens"]
        self._scores: list[float] = metadata["tokenizer.ggml.scores"]
        self._types: list[int] = metadata["tokenizer.ggml.token_type"]
        self._ids = {word: index for index, word in enumerate(self._words)}
        self._first: int = metadata["tokenizer.ggml.bos_token_id"]
        self.stop = frozenset({metadata["tokenizer.ggml.eos_token_id"]})

    def encode(self, text: str) -> list[int]:
        """Ids of the text after the mark of the beginning."""
        ids = [self._first]
        for piece in self._merge(list(text.replace(" ", _SPACE))):
            if piece in self._ids:
                ids.append(self._ids[piece])
            else:
                ids.extend(self._ids[f"<0x{byte:02X}>"] for byte in piece.encode())
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The same: a base model continues the text."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out."""
        parts: list[bytes] = []
        for index in ids:
            word, kind = self._words[index], self._types[index]
            if kind == _BYTE:
                parts.append(bytes([int(word[1:-1], 16)]))
            elif kind != _CONTROL:
                parts.append(word.replace(_SPACE, " ").encode())
        return b"".join(parts).decode(errors="replace")

    def _merge(self, pieces: list[str]) -> list[str]:
        """Joins the neighbours of the highest score, leftmost first, until none fit."""
        after = list(range(1, len(pieces) + 1))
        before = list(range(-1, len(pieces) - 1))
        offers: list[tuple[float, int, str]] = []

        def offer(left: int) -> None:
            if left >= 0 and (right := after[left]) < len(pieces):
                joined = pieces[left] + pieces[right]
                if (index := self._ids.get(joined)) is not None:
                    heapq.heappush(offers, (-self._scores[index], left, joined))

        for left in range(len(pieces)):
            offer(left)
        while offers:
            _, left, joined = heapq.heappop(offers)
            right = after[left] if pieces[left] else len(pieces)
            if right >= len(pieces) or pieces[left] + pieces[right] != joined:
                continue  # a neighbour changed after this was offered
            pieces[left], pieces[right] = joined, ""
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
            offer(left)
            offer(before[left])
        return [piece for piece in pieces if piece]
