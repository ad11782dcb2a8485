"""The arguments and options of `serve`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from evalengine.cli.command import Command
from evalengine.util.command import Namespace


def _words(
    words: Annotated[list[str] | None, Argument(metavar="setting=value", show_default=False, help="the model, the "
                     "engine and the server: model=tinymath port=8000")] = None,
    api_key: Annotated[str | None, Option(envvar="EVALENGINE_API_KEY", metavar="KEY", show_envvar=False, help="what "
                       "clients must send; better by the variable EVALENGINE_API_KEY, as a command line can be "
                       "seen")] = None,
) -> Namespace:  # fmt: skip
    """Serves a model by OpenAI's HTTP interface, in batches: the same request has the same bytes, whatever else is
    asked meanwhile."""
    return Namespace(words=words or [], api_key=api_key)


EPILOG = """\
  serve model=tinymath                      http://127.0.0.1:8000/v1: models, completions, chat/completions
  serve model.path=FOLDER port=8001 engine.max_num_seqs=256
  serve model=qwen3-0.6b host=0.0.0.0       for other machines, too: set EVALENGINE_API_KEY

  record=FOLDER                   every answer is kept there as part of a run, which `check`, `prove` and `compare` read
  host=127.0.0.1  port=8000       where it listens; port=0 is any that is free
  max_tokens=0                    the most that one choice may ask for; 0: what the model's context holds
  max_choices=1024 max_open=8192  choices of one request; choices that may wait or run
  max_connections=0               at once; 0: as many as the file descriptors (ulimit -n) leave room for
  max_body_mb=32 max_logprobs=20 client_seconds=60
  model, model.*, engine.*, batch_invariant, numerics, enable_thinking, chat_template_args, chat_template_date: as ever

Also /tokenize, /detokenize, /tokenizer_info, /health and /metrics. Ctrl-C or SIGTERM ends it once the answers that run
are finished, a second one at once.

Exit codes: 0 ended as asked, 1 failed, 2 bad usage or configuration."""
main = Command("serve", _words, "evalengine.integrations.openai_server.cli:main", EPILOG)
