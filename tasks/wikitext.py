"""WikiText-2 perplexity over whole pages (Merity et al. 2016, arXiv 1609.07843), task version 2.0 of lm-eval 0.4.12.

A row: {"page": " = Robert Boulter = \\n \\n Robert Boulter is an English film , television and theatre actor . ..."}.
The model scores the detokenised page; words and bytes are counted on the original one, so that perplexities of models
with different tokenizers compare.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from evalengine.tasks.base import Doc, Instance, Metric, MetricValue, Response, Task

# A heading of level one opens a page: " = Title = ", not " = = Section = = ".
TITLE = re.compile(r"^ = (?!= )(?:.*(?<! =))? = $")


def split_pages(text: str) -> list[Doc]:
    """The pages of a raw WikiText file, each from its title line to the line before the next title (62 in test)."""
    pages: list[list[str]] = []
    for line in text.split("\n"):
        if TITLE.match(line):
            pages.append([])
        if pages:  # the file opens with a blank line that belongs to no page
            pages[-1].append(line)
    return [{"page": "\n".join(page)} for page in pages]


def _spaced(mark: str) -> tuple[re.Pattern[str], str]:
    return re.compile(rf" {re.escape(mark)} "), f"{mark} "


def _enclosed(opening: str, closing: str) -> tuple[re.Pattern[str], str]:
    """White space just inside a pair of marks goes."""
    left, right = re.escape(opening), re.escape(closing)
    return re.compile(rf"{left}\s*([^{right}]*?)\s*{right}"), rf"{opening}\1{closing}"


# WikiText's tokenisation undone, in this order: each rule sees what the one before it left.
DETOKENISE: list[tuple[re.Pattern[str], str]] = [
    (re.compile("s '"), "s'"),
    (re.compile(r"/' [0-9]/"), r"/'[0-9]/"),  # lm-eval's replacement is literal, not a group: kept, it never matches
    *((re.compile(f" @{re.escape(mark)}@ "), mark) for mark in "-,."),
    *(_spaced(mark) for mark in ":;.!?,"),
    *(_enclosed(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    (re.compile("= = = ="), "===="),
    (re.compile("= = ="), "==="),
    (re.compile("= ="), "=="),
    (re.compile(" ° "), "°"),
    (re.compile(" \n"), "\n"),
    (re.compile("\n "), "\n"),
    (re.compile(" N "), " 1 "),
    (re.compile(" 's"), "'s"),
]


def detokenise(page: str) -> str:
    """Plain English text from a WikiText page: "film , television" -> "film, television", "@-@" -> "-"."""
    for pattern, replacement in DETOKENISE:
        page = pattern.sub(replacement, page)
    return page


class WikiText(Task):
    """One rolling log-likelihood request a page; the weights are the original page's words and UTF-8 bytes."""

    output_type = "loglikelihood_rolling"
    columns = ("page",)
    takes_fewshot = False
    metrics: ClassVar[dict[str, Metric]] = {
        "word_perplexity": Metric("weighted_perplexity", higher_is_better=False),
        "byte_perplexity": Metric("weighted_perplexity", higher_is_better=False),
        "bits_per_byte": Metric("bits_per_byte", higher_is_better=False),
    }

    def read_text(self, text: str) -> list[Doc]:
        return split_pages(text)

    def question(self, doc: Doc) -> str:
        return ""

    def target(self, doc: Doc) -> str:
        return detokenise(doc["page"])

    def requests(self, doc_id: int, doc: Doc, prompt: str) -> list[Instance]:
        return [Instance(self.name, doc_id, 0, "loglikelihood_rolling", self.target(doc))]

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[float]]:
        return {"none": [response.loglikelihood for response in responses]}

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        (loglikelihood,) = answers
        words, size = len(re.split(r"\s+", doc["page"])), len(doc["page"].encode("utf-8"))
        return {
            "word_perplexity": (loglikelihood, words),
            "byte_perplexity": (loglikelihood, size),
            "bits_per_byte": (loglikelihood, size),
        }
