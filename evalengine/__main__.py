"""The command line: `python -m evalengine [run] [setting=value ...]`, and commands with their own arguments.

Exit codes: 0 done, 1 failed (for `compare` and `gate`: the runs differ), 2 bad usage or configuration, 130 ended by
Ctrl-C, 143 by SIGTERM. Standard output holds the result and nothing else (a run's last line is `digest: <64 hex>`);
progress and errors go to standard error. Only the command that was named is imported, so that each answers at once;
and nothing at all before signals are watched.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence

from evalengine.util.endings import ended, say, watch_signals

COMPLETION = ("--install-completion", "--show-completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (default: the process's own) and returns its exit code."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without ± must not fail a finished run
        from evalengine.plain_text import format_warnings
        from evalengine.util.command import exit_code

        format_warnings()
        words = sys.argv[1:] if argv is None else list(argv)
        code = exit_code(lambda: _command(words))
        sys.stdout.flush()  # here, where a reader that has ended is known
        return code
    except KeyboardInterrupt as interrupt:
        return say(interrupt)
    except BrokenPipeError:  # the reader of standard output has ended (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _command(words: list[str]) -> int:
    """Runs a sub-command, shell completion or a run. Hydra never sees a sub-command's words."""
    if words[:1] in ([option] for option in COMPLETION) or "_EVALENGINE_COMPLETE" in os.environ:
        from evalengine.cli.run import complete

        return complete(words)
    if words[:1] in (["help"], ["-h"], ["--help"]):
        words = [*words[1:], "--help"]  # `help compare` and `--help compare` ask for the help of compare
    from evalengine.cli.commands import COMMANDS

    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    from evalengine.cli.run import command

    return command()(words)


def program() -> int:
    """The installed command and `python -m evalengine`: `main`, in a process that ends with it."""
    _open_standard_streams()
    try:
        watch_signals()
    except KeyboardInterrupt as interrupt:  # Python's own handler heard a signal that came before ours was there
        return say(interrupt)
    # A run makes millions of objects that live to its end and are in no cycles. At Python's thresholds the collector
    # takes 5 % of the user time of `limit=4`; at 200,000 it took 1.0 s of a run of 14,042 documents from the cache.
    gc.set_threshold(3_000_000)
    code = main()
    gc.freeze()  # after `limit=4`, Python's end takes 0.87 s of CPU time, and 0.22 s where its last collection is empty
    return ended(code)


def _open_standard_streams() -> None:
    """Opens the null device for each standard stream that the caller closed, as `2>&-` does: Python has None there, and
    the next file to be opened would take its number. Ends the process if it is standard output: results go there."""
    closed = [number for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)) if stream is None]
    for number in closed:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
    if 2 in closed:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if 1 in closed:
        os.write(
            2, b"evalengine: standard output is closed, and results are printed there; discard them by >/dev/null\n"
        )
        os._exit(2)


if __name__ == "__main__":
    sys.exit(program())
