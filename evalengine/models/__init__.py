"""The supported models: importing this package registers them."""

from __future__ import annotations

from evalengine.models import families

__all__ = ["families"]
