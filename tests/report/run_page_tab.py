"""A run's page in a browser: opening it, and what a reader does there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evalengine.report.html.run_page import write_run_report
from tests.browser import Browser, Tab

ROWS = "[...document.querySelectorAll('.grid-row')]"


def opened(browser: Browser, folder: Path, **screen: Any) -> Tab:
    """The run's page, written anew, in a tab of its own."""
    path, _ = write_run_report(folder)
    return browser.open(path, **screen)


def docs(tab: Tab) -> list[str]:
    """The first cell of each row in sight, from the top."""
    names: list[str] = tab.evaluate(f"{ROWS}.map(row => row.children[0].textContent)")
    return names


def search(tab: Tab, text: str, expected: str) -> None:
    """Types the text into the search field, and waits until the count reads `expected`."""
    tab.click(".search")
    tab.evaluate("document.querySelector('.search').select()")
    tab.type(text) if text else tab.press("Backspace")
    tab.wait(f"document.querySelector('.count').textContent === {json.dumps(expected)}")
