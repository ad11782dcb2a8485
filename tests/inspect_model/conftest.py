"""What the tests of inspect_ai's model need."""

from __future__ import annotations

import pytest

pytest.importorskip("inspect_ai", reason="needs inspect_ai: pip install 'evalengine[inspect]'")
