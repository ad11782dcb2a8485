"""Skips a module of tests where a server's libraries are missing."""

from __future__ import annotations

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=f"needs {needed}: pip install 'evalengine[serve]' httpx")
