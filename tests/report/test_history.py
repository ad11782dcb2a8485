"""A metric over checkpoints: its order, and the band of the paired change since the first one."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from evalengine.report.leaderboard.compose import board
from evalengine.report.leaderboard.history import history_picture, is_history
from tests.report.model_runs import model
from tests.report.test_board import BAD, GOOD, MIDDLE, three


def test_a_history_is_drawn_in_the_order_of_its_steps() -> None:
    models = [("step-3000", GOOD), ("step-1000", BAD), ("step-2000", MIDDLE)]
    table = board([model(name, {"sums": values}) for name, values in models])
    assert is_history(table) and table.steps == [3000, 1000, 2000]
    text = history_picture(table)
    places = [text.index(f"<title>{name}: ") for name in ("step-1000", "step-2000", "step-3000")]
    assert places == sorted(places) and "90.0 % [69.9, 97.2]" in text and 'class="band"' in text
    assert ">1k<" in text and ">step<" in text and "nan" not in text
    assert not is_history(three()), "models that name no step are no history by themselves"


def test_a_historys_band_is_the_paired_change_since_the_first_checkpoint() -> None:
    """Its corners above step 2000, against the test of step-2000 against step-1000, on the scale of the marks."""
    table = board([model(f"step-{n}000", {"sums": values}) for n, values in ((1, BAD), (2, MIDDLE), (3, GOOD))])
    drawn = ElementTree.fromstring(history_picture(table))
    (band,) = drawn.iter("{http://www.w3.org/2000/svg}polygon")
    corners = [tuple(map(float, corner.split(","))) for corner in band.get("points", "").split()]
    heights = [float(mark.get("cy", "0")) for mark in drawn.iter("{http://www.w3.org/2000/svg}circle")]
    assert corners[0] == corners[-1] and corners[0][1] == heights[0]  # no change yet
    change = next(test.result for test in table.contests[0].tests if (test.a, test.b) == (1, 2))
    pixels = (heights[2] - heights[0]) / 0.9  # of one: the values are 0, 0.45 and 0.9
    high, low = corners[1][1], corners[4][1]
    assert high == pytest.approx(heights[0] + pixels * change.ci_high, abs=0.1)
    assert low == pytest.approx(heights[0] + pixels * change.ci_low, abs=0.1)
