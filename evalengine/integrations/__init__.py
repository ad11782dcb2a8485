"""Connections to other libraries and programs. The core imports none of these packages."""
