"""Variance components: by hand, and what they come to on the whole."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from evalengine.report.stats.measured import TwoWay, samples, two_way


def test_documents_by_prompts_by_hand() -> None:
    """Rows 1, 2 and 3 points apart, columns 2: no residue, MS_documents = 2 * 1, MS_prompts = 3 * 2."""
    scores = np.array([[0.0, 2.0], [1.0, 3.0], [2.0, 4.0]])
    found = two_way(scores)
    assert (found.documents, found.prompts, found.both) == pytest.approx((1.0, 2.0, 0.0)) and found.p_value < 1e-6
    scores[0, 0] = 1.0  # MS_rest is 1/3: residues of 1/3 and 1/6 in six cells, over 2 degrees of freedom
    found = two_way(scores)
    assert found.both == pytest.approx((2 * (1 / 3) ** 2 + 4 * (1 / 6) ** 2) / 2)
    f = 6 * (5 / 6) ** 2 / found.both  # columns of 4/3 and 3: MS_prompts is 3 * 2 * (5/6)^2
    assert found.p_value == pytest.approx(stats.f.sf(f, 1, 2))
    assert two_way(np.ones((3, 2))).p_value == 1.0


def test_components_come_out_on_the_whole() -> None:
    """Normal parts of 4, 1 and 2: 3 standard errors of 400 draws."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(400):
        scores = rng.normal(0, 2, (40, 1)) + rng.normal(0, 1, (1, 6)) + rng.normal(0, 2**0.5, (40, 6))
        found = two_way(scores)
        drawn.append((found.documents, found.prompts, found.both))
    means, errors = np.mean(drawn, axis=0), np.std(drawn, axis=0) / 20
    assert (np.abs(means - [4, 1, 2]) < 3 * errors).all(), (means, errors)
    assert TwoWay(4, 1, 2, 0.5).stderr(40, 6) == pytest.approx((4 / 40 + 1 / 6 + 2 / 240) ** 0.5)


def test_samples_of_documents_come_out_on_the_whole() -> None:
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(400):
        chances = rng.beta(2, 2, 100)  # variance 1/20; a sample's within is 1/4 - 1/20
        found = samples(rng.binomial(4, chances) / 4, 4)
        drawn.append((found.between, found.within))
    means, errors = np.mean(drawn, axis=0), np.std(drawn, axis=0) / 20
    assert (np.abs(means - [0.05, 0.2]) < 3 * errors).all(), (means, errors)
