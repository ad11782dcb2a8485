"""WikiText-2 perplexity over whole pages (Merity et al. 2016, arXiv 1609.07843), task version 2.0 of lm-eval 0.4.13.

A row: {"page": " = Robert Boulter = \\n \\n Robert Boulter is an English film , television and theatre actor . ..."}.
The model scores the detokenised page; words and bytes are counted on the original one, so that perplexities of models
with different tokenizers compare.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from evalengine.config.schema import TemplateConfig
from evalengine.tasks.metric import DEFAULTS, Metric, MetricValue, rolling_scores
from evalengine.tasks.multiple_choice import with_enclosed
from evalengine.tasks.rows import Doc
from evalengine.tasks.templated import Templated

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


def _enclosed(opening: str, closing: str) -> Callable[[str], str]:
    r"""A rule that removes white space just inside a pair of marks, as lm-eval's `\(\s*([^\)]*?)\s*\)` does."""
    return lambda text: with_enclosed(text, opening, closing, lambda inner: f"{opening}{inner.strip()}{closing}")


def _replaced(pattern: str, replacement: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, replacement, text)


# The rules that undo WikiText's tokenisation, in this order: each takes the text that the rule before it left.
DETOKENISE: list[Callable[[str], str]] = [
    _replaced("s '", "s'"),
    _replaced(r"/' [0-9]/", r"/'[0-9]/"),  # lm-eval's pattern, copied though it never matches: "/" is part of it
    *(_replaced(f" @{re.escape(mark)}@ ", mark) for mark in "-,."),
    *(_replaced(rf" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    *(_enclosed(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    *(_replaced(*pair) for pair in (("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"))),
    *(_replaced(*pair) for pair in ((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"))),
]


def detokenise(page: str) -> str:
    """Plain English text from a WikiText page: "film , television" -> "film, television", "@-@" -> "-"."""
    for rule in DETOKENISE:
        page = rule(page)
    return page


class WikiText(Templated):
    """One rolling log-likelihood request a page; the weights are the original page's words and UTF-8 bytes."""

    forks = True
    limited = False
    takes_templates = False
    fixed = TemplateConfig(output_type="loglikelihood_rolling", doc_to_target="")
    columns = ("page",)
    shapes: ClassVar[Mapping[str, tuple[type, ...]]] = {"page": (str,)}
    metrics: ClassVar[dict[str, Metric]] = DEFAULTS["loglikelihood_rolling"]

    def read_text(self, text: str) -> list[Doc]:
        return split_pages(text)

    def target(self, doc: Doc) -> str:
        return detokenise(doc["page"])

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        return rolling_scores([*self.metrics], doc["page"], answers[0])
