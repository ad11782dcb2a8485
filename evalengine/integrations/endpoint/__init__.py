"""A hosted model behind an OpenAI-compatible HTTP API, evaluated on our tasks (`model.api=URL`)."""
