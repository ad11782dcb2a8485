"""Which part of a score's variance comes from where: documents, samples of one document, prompts.

Method of moments: mean squares are set equal to their expectations (Searle, Casella & McCulloch 1992, "Variance
Components", chapter 4; for persons by items, Brennan 2001, "Generalizability Theory", chapter 3). It is unbiased; what
comes out below 0 is given as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy

from evalengine.report.stats.intervals import Floats


@dataclass(frozen=True)
class Samples:
    """Variances of a score with several samples a document."""

    between: float  # of the documents' own means
    within: float  # of one sample around its document's mean


@dataclass(frozen=True)
class TwoWay:
    """Variances of a score of documents by prompts."""

    documents: float  # some are harder than others, under every prompt
    prompts: float  # some prompts are better than others, on every document
    both: float  # what is left: a document that one prompt solves and another does not
    p_value: (
        float  # of so large differences between prompts, if there are none: F, mean square of prompts over the rest
    )

    @property
    def total(self) -> float:
        return self.documents + self.prompts + self.both

    def stderr(self, documents: int, prompts: int) -> float:
        """Standard error of the mean over so many drawn documents and prompts."""
        parts = self.documents / documents + self.prompts / prompts + self.both / (documents * prompts)
        return float(np.sqrt(parts))


def samples(means: Floats, count: int) -> Samples:
    """From the documents' shares of `count` > 1 samples, right or wrong: means [n], n > 1.

    The samples of a document vary by p (1 - p) count / (count - 1), unbiased; the means by between + within / count.
    """
    within = float(np.mean(means * (1 - means))) * count / (count - 1)
    return Samples(max(0.0, float(np.var(means, ddof=1)) - within / count), within)


def two_way(scores: Floats) -> TwoWay:
    """From one score of every document under every prompt: scores [n, p], n > 1 and p > 1.

    E MS_documents = both + p documents, E MS_prompts = both + n prompts, E MS_rest = both.
    """
    n, p = scores.shape
    mean, rows, columns = scores.mean(), scores.mean(axis=1), scores.mean(axis=0)
    of_rows = p * float(np.sum((rows - mean) ** 2)) / (n - 1)
    of_columns = n * float(np.sum((columns - mean) ** 2)) / (p - 1)
    rest = scores - rows[:, None] - columns[None, :] + mean
    freedom = (n - 1) * (p - 1)
    both = float(np.sum(rest**2)) / freedom
    rounding = 1e-12 * max(of_rows, of_columns)
    test = float(scipy.special.fdtrc(p - 1, freedom, of_columns / both)) if both > rounding else float(of_columns == 0)
    return TwoWay(max(0.0, (of_rows - both) / p), max(0.0, (of_columns - both) / n), both, test)
