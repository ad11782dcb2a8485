"""The command line: exit codes 0, 1 and 2, one clear line on standard error, the result alone on standard output."""

from __future__ import annotations

import errno
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evalengine import __version__
from evalengine.__main__ import main
from evalengine.cli.command import Command
from evalengine.cli.commands import COMMANDS, explain, verify
from evalengine.cli.run import command as run_command
from evalengine.config.schema import Config
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.util.endings import Terminated
from tests.run_double import generated, write_run

ROOT = Path(__file__).parents[2]


@dataclass
class Result:
    folder: Path


def print_folder(folder: Path) -> str:
    print(f"digest: {folder}")
    return str(folder)


def install_runner(monkeypatch: pytest.MonkeyPatch, run: Callable[[Config], Any]) -> None:
    """Stands in for the engine: the command line's own behaviour is what is tested here."""
    runner = ModuleType("evalengine.harness.runner")

    def made(config: Config, on_complete: Callable[[Path], None], *_: Any) -> Any:
        result = run(config)
        on_complete(result.folder)
        return result

    runner.run = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evalengine.harness.runner", runner)
    monkeypatch.setattr("evalengine.report.run_table.print_report", print_folder)
    for name in ("write_page", "write_list"):  # the runs here have no folder
        monkeypatch.setattr(f"evalengine.report.html.on_complete.{name}", lambda folder: None)


def test_help_names_tasks_models_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in (
        "gsm8k",
        "arc_easy",
        "tinymath",
        "smollm2-135m",
        "model.path=",
        "data_dir=",
        "-m, --multirun",
    ):
        assert word in text
    assert all(re.search(rf"^  {name}\b", text, re.MULTILINE) for name in COMMANDS), "a command is not listed"
    assert max(map(len, text.splitlines())) <= 120


def test_help_has_room_for_more_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a_task_of_{number}_words" for number in range(40)]
    monkeypatch.setattr("evalengine.cli.run.available", lambda group: names)
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120 and all(f"  {name}" in "\n".join(lines) for name in names)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"evalengine {__version__} (contract ")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{__version__}"\n' in pyproject


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu"], "rnu: no such command; did you mean run?"),
        (["frobnicate"], "frobnicate: no such command; there are: run"),
        (["gsm8k"], "did you mean task=gsm8k?"),
        (["run", "tinymath"], "did you mean model=tinymath?"),
        (["noise_floor"], "did you mean experiment=noise_floor?"),
        (["--modle"], "--modle: settings have no dashes; write python -m evalengine modle=VALUE"),
        (["--limit", "5"], "--limit: settings have no dashes; write python -m evalengine limit=VALUE"),
        (["run", "--batch-invariant=no"], "no dashes; write python -m evalengine batch_invariant=VALUE"),
        (["verfy", "--quick"], "verfy: no such command; did you mean verify?"),
        (["task=[gsm8k,", "arc_easy]"], "arc_easy]: a setting is one word"),
        (["limit", "=", "5"], "limit: "),
        (["-m", "task=gsm8k", "limit=", "1,2"], "1,2: a setting is one word, name=value, without spaces around its ="),
        (["limit", "=5"], "limit: "),
        (["report", "x", "--csv"], "report: No such option: --csv (see report --help)"),
        (["report", "x", "--latex"], "--latex"),
        (["compare", "x", "--csv"], "--csv"),
        (["limit=1", "task.description=Solve", "it", "now"], "it: a setting is one word"),
        (["model=qwen"], "qwen3-0.6b or qwen3-1.7b"),
        (["task=gsm9k"], "did you mean gsm8k?"),
        (["engine.max_num_seq=1"], "did you mean engine.max_num_seqs?"),
        (["limit=abc"], "limit=abc"),
        (["verify", "engine", "kernels"], "verify: kernels: name one part, or none for both (see verify --help)"),
        (["verify", "engine.max_num_seqs=8"], "engine.max_num_seqs: verify varies the schedule itself"),
        (["verify", "batch_invariant=false"], "batch_invariant=false: promises no equal bits"),
        (["verify", "experiment=noise_floor"], "experiment=noise_floor: is several runs"),
        (["verify", "output_dir=x"], "output_dir: verify leaves no run"),
        (["verify", "kernels", "task=gsm9k"], "did you mean gsm8k?"),
        (["verify", "kernels", "--quick"], "--quick: belongs to verify engine"),
        (["verify", "engin"], "verify: engin: there are engine and kernels"),
        (["verify", "engine", "--axes", "batch", "tiles"], "'tiles' is not one of"),
        (["verify", "engine", "--logprobs", "-1"], "--logprobs"),
        (["verify", "model.path=shape:qwen9"], "no such shape; there are shape:qwen3-0.6b, shape:qwen3-8b"),
        (["verify", "engine", "--layers", "2"], "only a shape's depth can be cut"),
        (["verify", "model.path=shape:qwen3-8b", "task=gsm8k"], "a shape has no tokenizer; leave task and limit out"),
        (["bench", "matmull"], "matmull: there is no such benchmark; there are throughput and start"),
        (["limit=4", "compare"], "compare: a command's name comes first: python -m evalengine compare ..."),
        (["help", "comapre"], "comapre: no such command; did you mean compare?"),
        (["check", "/nowhere/r.json"], "check: /nowhere/r.json: no such file or folder; give a receipt"),
        (["check", "/nowhere/r.json", "--model", "m"], "check: /nowhere/r.json: no such file or folder; give a"),
        (["report", "/nowhere/a", "/nowhere/b"], "/nowhere/a: no such file or folder; name a run's folder"),
        (["--install-completion", "WORD"], "--install-completion WORD: there are bash, zsh, fish,"),
        (["--show-completion", "bash", "zsh"], "--show-completion bash zsh: there are bash, zsh, fish,"),
        (["comapre"], "comapre: no such command; did you mean compare?"),
        (["compare"], "compare: Missing argument 'RUN'. (see compare --help)"),
        (["compare", "one"], "one"),
        (["compare", "/nowhere/a", "/nowhere/b"], "/nowhere/a: no such file or folder"),
        (["compare", "a", "b", "--level", "bits"], "'bits' is not one of"),
        (["baseline"], "baseline: give a run"),
        (
            ["gate", "a", "b", "--polcy", "bitwise"],
            "No such option: --polcy (Possible options: --policy)",
        ),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in err
    assert err.startswith("evalengine: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        *(["verify", "--help"], ["verify", "engine", "-h"], ["verify", "kernels", "-h"], ["bench", "-h"]),
        *(["compare", "--help"], ["baseline", "-h"], ["gate", "-h"]),
        *(["-h", "compare"], ["--help", "bench", "throughput"], ["help", "gate"], ["help"], ["-h", "run"]),
    ],
)
def test_commands_have_their_own_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whether help is asked for behind the command's name or before it."""
    assert main(words) == 0
    name = next((word for word in words if word in COMMANDS), "run")
    assert re.match(rf"Usage: python -m evalengine {name} ", capsys.readouterr().out)


ALL = [
    run_command(),
    *COMMANDS.values(),
]
DECLARED = [command for command in ALL if isinstance(command, Command)]


@pytest.mark.parametrize("command", DECLARED, ids=lambda command: command.name)
def test_every_command_says_its_exit_codes_and_has_work(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: python -m evalengine {command.name} ") and "\nExit codes: 0 " in text
    assert max(map(len, text.splitlines())) <= 120
    module, function = command.work.split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_help_of_a_command_loads_nothing_heavy() -> None:
    """Statistics, arrays and Hydra take longer to import than an answer may take."""
    heavy = {"torch", "scipy", "numpy", "pyarrow", "hydra", "omegaconf", "rich.table"}
    program = f"import sys, evalengine.__main__ as m; m.main(['compare', '-h']); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_comparison_of_two_runs_loads_fewer_than_60_of_our_modules(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / f"{n}", [generated(0), generated(1)], lambda doc, n=n: float(n))) for n in (0, 1)]
    names = "[name for name in sys.modules if name.split('.')[0] == 'evalengine']"
    program = f"import sys, evalengine.__main__ as m; m.main({['compare', *runs]}); print(len({names}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    *_, verdict, count = done.stdout.splitlines()
    assert verdict.startswith("verdict: DIFFERENT") and int(count) < 60


def test_an_option_takes_several_words_up_to_the_next() -> None:
    args = explain.parse(["A", "B", "--with", "data_dir=x", "model.path=y", "--alone"])
    assert (args.sources, args.places) == (["A", "B"], ["data_dir=x", "model.path=y"])
    args = verify.parse(["--axes", "batch", "order", "limit=3", "engine", "--quick"])
    assert (args.axes, args.settings, args.what, args.quick) == (["batch", "order"], ("limit=3",), "engine", True)


def test_commands_exit_by_what_they_find(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def command(error: BaseException) -> Callable[[Any], int]:
        def run(arguments: Any) -> int:
            raise error

        return run

    for error, code, message in (
        (EvalEngineError("weights: damaged"), 1, "evalengine: weights: damaged\n"),
        (KeyboardInterrupt(), 130, "Interrupted: rerun the command to resume"),
        (Terminated(), 143, "Terminated: rerun the command to resume"),
        (ZeroDivisionError("ours"), 1, "Traceback"),
    ):
        monkeypatch.setattr("evalengine.certify.cli._engine", command(error))
        assert main(["verify", "engine"]) == code
        assert message in capsys.readouterr().err
    monkeypatch.setattr("evalengine.certify.cli._engine", lambda arguments: 0 if arguments.quick else 1)
    assert main(["verify", "engine", "--quick"]) == 0 and main(["verify", "engine"]) == 1


@pytest.mark.parametrize(("error", "code"), [(EvalEngineError("damaged"), 1), (ConfigError("unlike"), 2)])
def test_what_a_command_does_not_catch_is_one_line(
    error: EvalEngineError, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(arguments: Any) -> int:
        raise error

    monkeypatch.setattr("evalengine.report.cli.compare.main", command)
    assert main(["compare", "a", "b"]) == code
    assert capsys.readouterr() == ("", f"evalengine: {error}\n")


def test_several_problems_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["limit=0", "engine.dtype=int8"]) == 2
    assert capsys.readouterr().err.count("\n  - ") == 2


def test_cfg_prints_and_runs_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install_runner(monkeypatch, lambda config: pytest.fail("it ran"))
    assert main(["run", "--cfg", "limit=7"]) == 0
    assert "limit: 7\n" in capsys.readouterr().out


def test_a_run_prints_its_digest_last(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def run(config: Config) -> Result:
        seen.append(config)
        return Result(Path("abc"))

    install_runner(monkeypatch, run)
    assert main(["run", "limit=3"]) == 0
    assert main(["limit=4"]) == 0
    assert [config.limit for config in seen] == [3, 4]
    assert capsys.readouterr().out == "digest: abc\ndigest: abc\n"


def failing(error: BaseException) -> Callable[[Config], Any]:
    """A runner that raises the error."""

    def run(config: Config) -> Any:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (EvalEngineError("weights.safetensors: damaged"), 1, "evalengine: weights.safetensors: damaged\n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere/file"), 1, "evalengine: the disk is full"),
        (KeyboardInterrupt("results/x"), 130, "Interrupted: finished requests are in results/x; the same"),
        (Terminated("results/x"), 143, "Terminated: finished requests are in results/x; the same"),
    ],
    ids=["ours", "full disk", "Ctrl-C in a run", "SIGTERM in a run"],
)
def test_failures_are_one_line_and_a_code(
    error: BaseException, code: int, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_runner(monkeypatch, failing(error))
    assert main([]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(expected) and err.count("\n") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), PermissionError(errno.EACCES, "no")])
def test_our_own_bugs_show_a_traceback(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_runner(monkeypatch, failing(error))
    assert main([]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_what_the_start_waits_for(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("evalengine.cli.run.warn", lambda line, whose: shown.append(line))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    install_runner(monkeypatch, lambda config: shown.append("run") or Result(Path("f")))
    for settings in (["limit=1"], ["limit=1", "progress=false"], ["limit=1", "--cfg"]):
        assert main(settings) == 0
    line = "arithmetic on tinymath: loading libraries, rows and the model ..."
    assert shown == [*[line] * terminal, "run", "run"]


def test_a_sweep_goes_on_after_a_failure_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: Config) -> Result:
        if config.limit == 2:
            raise EvalEngineError("no")
        return Result(Path(str(config.limit)))

    install_runner(monkeypatch, run)
    assert main(["-m", "limit=1,2,3"]) == 1
    out, err = capsys.readouterr()
    assert out == "digest: 1\ndigest: 3\nbatch_invariant=true: 2 runs, 2 digests: no two agree\n"
    assert "[1/3] limit=1\n" in err and "[3/3] limit=3\n" in err
    assert main(["-m", "limit=1,3"]) == 0


@pytest.mark.parametrize(
    ("closed", "code", "out", "err"),
    [
        (
            ">&-",
            2,
            "",
            "evalengine: standard output is closed, and results are printed there; discard them by >/dev/null",
        ),
        ("2>&-", 0, f"evalengine {__version__} (contract", ""),
        ("<&- 2>&-", 0, f"evalengine {__version__} (contract", ""),
    ],
)
def test_streams_that_the_caller_closed(closed: str, code: int, out: str, err: str) -> None:
    command = f"{sys.executable} -m evalengine --version {closed}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (code, err) and done.stdout.startswith(out)


def test_an_interrupt_ends_a_sweep(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install_runner(monkeypatch, failing(KeyboardInterrupt()))
    assert main(["-m", "limit=1,2,3"]) == 130
    assert "[2/3]" not in capsys.readouterr().err
