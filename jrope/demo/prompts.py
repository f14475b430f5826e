"""What the demo asks: questions about a document, and unrelated requests between."""

import importlib.resources
from collections.abc import Sequence

from jrope.demo.scheduler import Request
from jrope.demo.tokenizer import Tokenizer
from jrope.demo.weights import ModelName

# Requests arrive when the server has computed so many tokens: a clock that makes runs
# comparable, whatever the machine's speed. The document's first reader is done by the
# time its second one comes, which so finds its pages.
_WAIT = 12

_HALF, _WHOLE = 2, 4  # paragraphs of the document


def sample_text() -> str:
    """The text that the golden logits were made on."""
    folder = importlib.resources.files("jrope.demo") / "golden"
    return (folder / "sample.txt").read_text(encoding="utf-8")


def _document(paragraphs: int) -> str:
    story = sample_text().split(" Question:")[0]
    return "\n\n".join(story.split("\n\n")[:paragraphs])


def _questions(model: ModelName) -> list[tuple[str, str]]:
    """Ten (question, prompt): five on one document, whose pages are used again."""
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
        (question, template.format(document=_document(length), question=question))
        for length, question in about
    ]
    unrelated = [(text, text) for text in others]
    return [each for pair in zip(asked, unrelated, strict=True) for each in pair]


def make_requests(
    model: ModelName, tokenizer: Tokenizer, own: Sequence[str] = ()
) -> list[Request]:
    """The demo's ten requests, after a person's own ones.

    Args:
      model: which model is asked.
      tokenizer: of that model.
      own: further prompts; they arrive first.
    """
    asked = [*((text, text) for text in own), *_questions(model)]
    requests = [
        Request(name=i, text=text, prompt=tokenizer.encode_prompt(prompt), arrival=0)
        for i, (text, prompt) in enumerate(asked)
    ]
    first = requests[: len(own) + 2]
    start = sum(len(request.prompt) for request in first)
    for turn, request in enumerate(requests[len(first) :]):
        request.arrival = start + turn * _WAIT
    return requests
