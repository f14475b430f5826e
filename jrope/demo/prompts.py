"""What the demo asks: questions about a document, and unrelated requests between."""

import importlib.resources
from collections.abc import Sequence

from jrope.demo.requests import Request
from jrope.demo.tiny import Picture, encode_parts
from jrope.demo.tokenizer import Tokenizer
from jrope.demo.weights import ModelName

# Requests arrive when the server has computed so many tokens: a clock that makes runs
# comparable, whatever the machine's speed. The document's first reader is done by the
# time its second one comes, which so finds its pages.
_WAIT = 12

_HALF, _WHOLE = 2, 4  # paragraphs of the document

Parts = tuple[str | Picture, ...]  # of a prompt, in order


def sample_text() -> str:
    """The text that the golden logits were made on."""
    folder = importlib.resources.files("jrope.demo") / "golden"
    return (folder / "sample.txt").read_text(encoding="utf-8")


def _document(paragraphs: int) -> str:
    story = sample_text().split(" Question:")[0]
    return "\n\n".join(story.split("\n\n")[:paragraphs])


def _questions(model: ModelName) -> list[tuple[str, Parts]]:
    """Ten (question, prompt): some on one document, whose pages are used again."""
    if model == "tiny-qwen2-vl":
        return [("".join(map(str, parts[1:])), parts) for parts in _picture_prompts()]
    if model == "smollm2":
        template = (
            "Read this text and answer the question.\n\nText: {document}\n\n"
            "Question: {question}\nShort answer:"
        )
        others = [
            "What is the capital of France?",
            "Write a Python function that adds two numbers.",
            "At what temperature does water boil?",
            "Write one sentence about the sea.",
            "What do bees make?",
        ]
    else:  # a base model: it continues what it is given
        template = "{document} Question: {question} Answer:"
        others = [
            "The capital of France is",
            "def fibonacci(n):\n",
            "Once upon a time, in a small village,",
            "Ingredients for pancakes:\n-",
            "Water boils at",
        ]
    about = [
        (_HALF, "In what year was the lighthouse built?"),
        (_HALF, "Who was the first keeper?"),
        (_HALF, "In what year was the storm?"),
        (_WHOLE, "How many steps lead to the gallery?"),
        (_WHOLE, "Which birds did he draw?"),
    ]
    asked = [
        (question, (template.format(document=_document(length), question=question),))
        for length, question in about
    ]
    unrelated = [(text, (text,)) for text in others]
    return [each for pair in zip(asked, unrelated, strict=True) for each in pair]


def _picture_prompts() -> list[Parts]:
    """Ten prompts with pictures of differing grids, some of them shown again.

    The street has the grid of the harbour and so the same token ids: a cache that went
    by these would take one for the other.
    """
    ask = "Look closely, then answer the question in a single short sentence. "
    harbour = Picture(kind="image", grid_thw=(1, 20, 28), seed=1)
    street = Picture(kind="image", grid_thw=(1, 20, 28), seed=2)
    chart = Picture(kind="image", grid_thw=(1, 12, 34), seed=3)
    stamp = Picture(kind="image", grid_thw=(1, 8, 6), seed=4)
    film = Picture(kind="video", grid_thw=(6, 12, 16), seed=5)
    clip = Picture(kind="video", grid_thw=(3, 16, 10), seed=6)
    return [
        (ask, film, "Who comes through the door?"),
        (ask, "What is the capital of France?"),
        (ask, harbour, "How many boats are there?"),
        (ask, chart, "Where on this chart was this stamp used? ", stamp),
        (ask, harbour, "Which flag do they fly?"),
        (ask, street, "How many boats are there?"),
        (ask, film, "Who leaves first?"),
        (ask, clip, "Does this ship lie in that harbour? ", harbour),
        (ask, "At what temperature does water boil?"),
        (ask, stamp, stamp, "Are these the same?"),
    ]


def make_requests(
    model: ModelName, tokenizer: Tokenizer, own: Sequence[str] = ()
) -> list[Request]:
    """The demo's ten requests, after a person's own ones.

    Args:
      model: which model is asked.
      tokenizer: of that model.
      own: further prompts; they arrive first.
    """
    asked = [*((text, (text,)) for text in own), *_questions(model)]
    requests: list[Request] = []
    for name, (text, parts) in enumerate(asked):
        ids, media = encode_parts(parts, tokenizer)
        requests.append(
            Request(name=name, text=text, prompt=ids, arrival=0, media=media)
        )
    first = requests[: len(own) + 2]
    start = sum(len(request.prompt) for request in first)
    for turn, request in enumerate(requests[len(first) :]):
        request.arrival = start + turn * _WAIT
    return requests
