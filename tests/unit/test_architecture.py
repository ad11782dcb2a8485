"""The package's imports follow its arrows: conf -> harness -> engine -> layers -> kernels -> records -> report."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.command import call
from tests.unit.arrows import ARROWS, WINGS

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "datasets", "triton", "pandas"}


def package_of(file: Path) -> str:
    """The package of evalengine to which the file belongs, or the name of a file beside the packages."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return package_named(parts[1:]) if parts[0] == "evalengine" else parts[0]


def package_named(parts: Sequence[str]) -> str:
    """The package of a module of evalengine, given as the parts of its name: each integration is one of its own."""
    return ".".join(parts[:2]).removesuffix(".__init__") if parts[0] == "integrations" else parts[0]


def sources() -> Iterator[Path]:
    """Every source file once: linked folders are read where they stand."""
    for top in ("evalengine", "kernels", "tasks", "benchmarks"):
        for file in sorted((ROOT / top).rglob("*.py")):
            if top != "evalengine" or file.relative_to(ROOT).parts[1] not in ("kernels", "tasks", "conf"):
                yield file


def module_of(file: Path) -> str:
    """The file's module, as `evalengine.report.read.run`; `kernels/` and `tasks/` are part of the package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = ("evalengine", *parts) if parts[0] in ("kernels", "tasks") else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def naming(file: Path) -> list[ast.Import | ast.ImportFrom | ast.Constant]:
    """What can name a module in the file, functions included: import statements and texts. Parsing every source takes
    seconds, so it is done once."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Constant)]


def import_statements(file: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in naming(file) if not isinstance(node, ast.Constant)]


def imports(file: Path) -> Iterator[str]:
    """Every absolute module name that the file imports, functions included."""
    for node in import_statements(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            if node.module == "evalengine":
                yield from (f"evalengine.{alias.name}" for alias in node.names)
            yield node.module


def test_every_arrow_is_allowed_and_used() -> None:
    wrong = []
    unused = {(package, name) for package, names in ARROWS.items() for name in names}
    for file in sources():
        package = package_of(file)
        allowed = ARROWS[package] | {package, "plain_text"}
        for name in imports(file):
            top, _, rest = name.partition(".")
            outside = top in ("benchmarks", "tests") and top != package
            outside = outside and (package, name) != ("benchmarks", "tests.references")
            imported = package_named(rest.split(".")) if top == "evalengine" and rest else package
            unused.discard((package, imported))
            if outside or imported not in allowed:
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)
    assert not unused


def integrations_imported(file: Path) -> list[str]:
    """The integrations that the file imports, or names for `import_module`; `load` takes "module:attribute"."""
    texts = [node.value for node in naming(file) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = [*imports(file), *(text for text in texts if re.fullmatch(r"[\w.]+", text))]
    return [name for name in names if f"{name}.".startswith("evalengine.integrations.")]


def test_the_core_imports_no_integration(tmp_path: Path) -> None:
    core = [file for file in sources() if not package_of(file).startswith("integrations")]
    assert not {str(file): names for file in core if (names := integrations_imported(file))}
    assert not [package for package, allowed in ARROWS.items() if "integrations" in f"{allowed}" and "." not in package]
    for number, planted in enumerate(
        ("import evalengine.integrations.ray", "def work():\n    from evalengine.integrations.ray import engines",
         "from evalengine import integrations", "import_module('evalengine.integrations.ray')")
    ):  # fmt: skip
        (file := tmp_path / f"{number}.py").write_text(planted)
        assert integrations_imported(file)


def test_what_the_core_loads_by_name_is_there() -> None:
    """Nothing else reads these texts before a run needs what they name."""
    files = {module_of(file): file for file in sources()}
    texts = {str(node.value) for file in files.values() for node in naming(file) if isinstance(node, ast.Constant)}
    named = {text for text in texts if re.fullmatch(r"evalengine\.[\w.]+:\w+", text)}
    assert {target.split(".")[2] for target in named if ".integrations." in target} == {
        *("endpoint", "exports", "inspect_ai", "lm_eval", "lm_eval_tasks", "openai_server", "ray", "sandbox")
    }
    for module, _, attribute in (target.partition(":") for target in named):
        body = ast.parse(files[module].read_text(encoding="utf-8")).body
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        defined |= {ast.unparse(name) for node in body if isinstance(node, ast.Assign) for name in node.targets}
        assert attribute in defined, f"{module}:{attribute}"


def test_the_core_runs_without_integrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("evalengine.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "evalengine.integrations", None)
    done = call("limit=1", f"output_dir={tmp_path}", "task.generation.max_gen_toks=2")
    assert done.code == 0, done.err


def test_lines_are_printed_in_one_place() -> None:
    """`print` writes what a file holds as it is: `say` and `warn` escape it. Left are whole JSON and YAML, GitHub's
    commands, a shell's script, a worker's pipe, and the benchmark's own numbers."""
    raw = {"plain_text", "bench", "integrations.sandbox"}
    calls = {
        f"{module_of(file).removeprefix('evalengine.')}: {ast.unparse(node.args[0])}"
        for file in sources()
        if package_of(file) not in raw and file.is_relative_to(ROOT / "evalengine")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert calls == {
        "cli.run: '---\\n'.join((to_yaml(job.config) for job in jobs))",
        "engine.text.grammar: json.dumps(reply)",
        "engine.text.template_worker: json.dumps(reply)",
        "cli.run: get_completion_script(prog_name=SCRIPT, complete_var=REQUEST, shell=shell)",
        "report.cli.gate: command",
        "report.cli.gate: to_json(report)",
    }


def test_every_wing_of_the_report_imports_those_below_it() -> None:
    wrong, below = [], "evalengine.report."
    for file in (ROOT / "evalengine" / "report").rglob("*.py"):
        module = module_of(file).removeprefix("evalengine.report").removeprefix(".")
        if not module:
            continue
        wing = module.split(".")[0]
        for name in imports(file):
            if name.startswith(below) and name.removeprefix(below).split(".")[0] not in {wing} | WINGS[wing]:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_pairs_of_runs_are_tested_in_one_place() -> None:
    """Two runs, several models and gates then have the same clusters, weights and directions."""
    callers = {
        module_of(file)
        for file in sources()
        for node in import_statements(file)
        if isinstance(node, ast.ImportFrom) and node.module == "evalengine.report.stats.paired"
        if any(name.name == "paired" for name in node.names)
    }
    assert {name for name in callers if not name.startswith("benchmarks")} == {"evalengine.report.stats.scores"}


def module_graph() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, anywhere: in functions, for type checkers and in texts, too.

    A text that is a module's whole name, or "module:function", names what is imported once it is needed; "evalengine"
    alone is the program's name.
    """
    files = {module_of(file): file for file in sources()}
    graph = {}
    for module, file in files.items():
        imported = {name for name in imports(file) if name in files}
        for node in naming(file):
            if isinstance(node, ast.ImportFrom):
                modules = {alias.name for alias in node.names if f"{node.module}.{alias.name}" in files}
                imported |= {f"{node.module}.{name}" for name in modules}
                if len(modules) == len(node.names):  # every name is a module: none is from the package's own file
                    imported.discard(str(node.module))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                imported |= {node.value.partition(":")[0]} & (files.keys() - {"evalengine"})
        graph[module] = imported - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules in which each imports every other, itself or through others."""
    reached = {module: reachable(graph, module) for module in graph}
    loops: list[set[str]] = []
    for module in graph:
        circle = {other for other in reached[module] if module in reached[other]}
        if len(circle) > 1 and circle not in loops:
            loops.append(circle)
    return loops


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules that `start` imports, itself or through others."""
    seen, waiting = set(), [start]
    while waiting:
        for name in graph[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = module_graph()
    loops = circles(graph)
    lines = [f"{name} imports {', '.join(sorted(graph[name] & circle))}" for circle in loops for name in sorted(circle)]
    assert not loops, "\n".join(lines)


def test_the_search_finds_circles() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f", "a"}, "f": {"e"}}
    assert circles(graph) == [{"b", "c"}, {"e", "f"}]
    whole = module_graph()
    assert "evalengine.report.read.load" in whole["evalengine.report.cli.compare"]
    whole["evalengine.report.read.run"].add("evalengine.report.read.load")  # the data model must not import it
    assert any("evalengine.report.read.run" in circle for circle in circles(whole))
    assert "benchmarks.kernels_and_steps" in whole["benchmarks.arguments"]  # by a text: its words' work


def test_only_the_plugin_and_the_adaptor_import_lm_eval() -> None:
    """lm-eval is optional: everything else runs, and reads its files, without it."""
    users = [file for file in sources() if any(name.split(".")[0] == "lm_eval" for name in imports(file))]
    assert {package_of(file) for file in users} == {"integrations.lm_eval", "integrations.lm_eval_tasks"}


def test_the_adaptor_is_read_without_lm_eval() -> None:
    """The adaptor's modules load lm-eval, which loads torch, only when a task of lm-eval is named."""
    modules = [f"evalengine.tasks.{file.stem}" for file in (ROOT / "tasks").glob("lm_eval_*.py")]
    modules += [module_of(file) for file in (ROOT / "evalengine" / "integrations" / "lm_eval_tasks").glob("*.py")]
    program = f"import sys, {', '.join(modules)}; print(*sorted({{'lm_eval', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_package_has_its_arrows() -> None:
    assert {package_of(file) for file in sources()} <= set(ARROWS)


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    wrong = [
        f"{file.name}: {name}"
        for file in sources()
        if package_of(file) == "kernels"
        for name in imports(file)
        if name.split(".")[0] not in allowed and not f"{name}.".startswith("evalengine.kernels.")
    ]
    assert not wrong


def test_kernels_is_a_namespace_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()  # a package would shadow the Hub's `kernels` in transformers


LIGHT = [
    "evalengine",
    "evalengine.__main__",
    "evalengine.api.evaluate",
    "evalengine.report.python.results",
    "evalengine.util.command",
    "evalengine.cli.run",
    "evalengine.cli.commands",
    "benchmarks.arguments",
    "evalengine.report.run_table",
    "evalengine.report.cli.report",
    "evalengine.report.html.run_page",
    "evalengine.records.lm_eval",
    "evalengine.certify.cli",
    "evalengine.explain.cli",
    "benchmarks.kernels_and_steps",
    "benchmarks.cached",
    "evalengine.bench.throughput_cli",
    "evalengine.cache.cli",
    "evalengine.receipts.cli",
    "evalengine.integrations.lm_eval.cli",
    "evalengine.integrations.lm_eval.arguments",
]


def heavy_after(*modules: str) -> dict[str, list[str]]:
    """Module -> the heavy ones that are loaded once a new process has imported it after those before it."""
    program = (
        "import importlib, json, sys\nloaded = {}\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded[name] = sorted({HEAVY} & set(sys.modules))\n"
        "print(json.dumps(loaded))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded: dict[str, list[str]] = json.loads(done.stdout)
    return loaded


def test_imports_stay_light() -> None:
    """Help, configuration errors and reports answer without loading torch, even where all these modules are used."""
    heavy = {module: names for module, names in heavy_after(*LIGHT).items() if names}
    assert not heavy, f"the first of these loads them: {heavy}"


def test_the_light_import_check_can_fail() -> None:
    assert "pandas" in heavy_after("json", "pandas")["pandas"]
