"""An OpenAI-compatible server over one engine (`python -m evalengine serve`): the same request has the same bytes."""
