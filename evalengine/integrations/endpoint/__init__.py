"""Somebody else's model behind an HTTP interface of OpenAI's kind, measured by our tasks (`model.api=URL`)."""
