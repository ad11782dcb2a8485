"""Pages: one self-contained HTML file each, which fetches nothing and trusts no text that a model wrote."""
