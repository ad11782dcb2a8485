"""WikiText: pages, detokenisation, and perplexities by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.harness.metrics import summarize
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Response
from evalengine.tasks.registry import load_task
from evalengine.tasks.wikitext import detokenise, split_pages

RAW = " \n = First page = \n \n Text . \n = = A section = = \n More = = . \n \n = N = \n x \n"


def wikitext(folder: Path) -> Task:
    (job,) = compose_jobs(["task=wikitext"])
    task = load_task("wikitext", job.config.tasks["wikitext"], data_dir=str(folder))
    task.load()
    return task


def test_pages_start_at_titles() -> None:
    assert [page["page"] for page in split_pages(RAW)] == [
        " = First page = \n \n Text . \n = = A section = = \n More = = . \n ",
        " = N = \n x \n",
    ]
    assert split_pages("no title here\n") == []


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("film , television and stage .", "film, television and stage ."),  # a final dot has no space behind it
        ("one . two ; three : four ! five ? six", "one. two; three: four! five? six"),
        ("well @-@ known 1 @,@ 000 @.@ 5", "well-known 1,000.5"),
        ("the boys ' ball", "the boys' ball"),
        ("it is Ann 's", "it is Ann's"),
        ("the boys ' ball is Ann 's", "the boys'ball is Ann's"),  # two apostrophes pass for a pair of quotes
        ("( a , b ) [ c ] { d }", "(a, b) [c] {d}"),
        ('he said " yes " and " no "', 'he said "yes" and "no"'),
        ("it ' quoted ' it", "it 'quoted' it"),
        (" = = = Deep = = = \n", " === Deep ===\n"),
        (" = = Section = = \n x", " == Section ==\nx"),
        (" = = = = Deepest = = = = ", " ==== Deepest ==== "),
        ("20 ° C", "20°C"),
        ("N N of N them", "N 1 of 1 them"),
        ("a \n b", "a\nb"),
        ("", ""),
    ],
)
def test_detokenisation(tokens: str, text: str) -> None:
    """The tokenised text's spaces and marks are undone, as in lm-eval."""
    assert detokenise(tokens) == text


def test_perplexities_by_hand(tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(" \n = é = \n a b \n = M = \n c", encoding="utf-8")
    task = wikitext(tmp_path)
    assert [[i.context for i in instances] for instances in task.instances()] == [[" = é =\na b "], [" = M =\nc"]]
    values = [
        task.process_results(doc, [Response(loglikelihood=ll)]) for doc, ll in zip(task.docs, (-8.0, -4.0), strict=True)
    ]
    # The pages are " = é = \n a b " (7 words by splitting at white space, 14 bytes) and " = M = \n c" (5 and 10)
    assert values[0]["word_perplexity", "none"] == (-8.0, 7)
    assert values[0]["bits_per_byte", "none"] == values[0]["byte_perplexity", "none"] == (-8.0, 14)
    assert summarize(task, values) == {
        "word_perplexity,none": pytest.approx(math.exp(12 / 12)),
        "word_perplexity_stderr,none": "N/A",
        "byte_perplexity,none": pytest.approx(math.exp(12 / 24)),
        "byte_perplexity_stderr,none": "N/A",
        "bits_per_byte,none": pytest.approx(12 / 24 / math.log(2)),
        "bits_per_byte_stderr,none": "N/A",
    }


def test_real_pages(data_dir: Path) -> None:
    """The test split has its known pages and words, and no mark of tokenisation is left."""
    task = wikitext(data_dir)
    assert len(task.docs) == 62
    assert task.docs[0]["page"].startswith(" = Robert Boulter = \n \n Robert Boulter is an English film , television")
    values = [task.process_results(doc, [Response()]) for doc in task.docs]
    # There are 241211 words between white space, and an empty string at either end of each page.
    assert sum(value["word_perplexity", "none"][1] for value in values) == 241211 + 2 * 62  # type: ignore[index]
    texts = [instance.context for (instance,) in task.instances()]
    assert not any(mark in text for text in texts for mark in (" @-@ ", " @,@ ", " , ", " 's", "= = ="))
