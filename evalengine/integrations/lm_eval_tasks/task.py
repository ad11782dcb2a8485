"""A task of lm-evaluation-harness as a task of ours: `task=lm_eval/NAME`.

lm-eval's own object makes the documents, the prompts and the requests, reads the answers with its filters, scores them
and adds them up; planning, the engine, the journal and the records are the harness's.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalengine.config.schema import TaskConfig
from evalengine.errors import ConfigError, one_line
from evalengine.integrations.lm_eval_tasks.index import leaf_of, lm_eval_version, metric_names
from evalengine.integrations.lm_eval_tasks.settings import (
    generation_kwargs_problems,
    local_rows,
    overridden,
    problems,
    resolved,
    settings_of,
    with_dataset,
)
from evalengine.tasks.base import See, Task, named_errors
from evalengine.tasks.instance import Instance, Response
from evalengine.tasks.lm_eval_quiet import RandomNumbers, quiet
from evalengine.tasks.lm_eval_yaml import evaluated_split, exemplar_split
from evalengine.tasks.metric import Aggregation, Metric, MetricValue
from evalengine.tasks.rows import Doc, Row, Rows, cluster_names, content_hash
from evalengine.tasks.templates import index_warning, literal_warnings
from evalengine.util.forked import spread
from evalengine.util.hub import offline_if_unreachable

FEW = ("bleu", "chrf", "chrf++", "ter")  # lm-eval resamples these a hundred times at most
SAME = ("mean", "perplexity", "weighted_perplexity", "bits_per_byte")  # those of harness.metrics, which sum exactly


class LmEvalTask(Task):
    """The task that `config.lm_eval.name` names in the installed lm-eval. Before `load` only its settings are known."""

    columns = ()
    metrics = {}  # noqa: RUF012  # lm-eval's are known once it is loaded: `aggregation`, `higher_is_better`

    def __init__(self, name: str, config: TaskConfig, **arguments: Any) -> None:
        """Raises ConfigError without lm-eval, for a name that it lacks, and for settings that cannot be honoured."""
        with named_errors(f"tasks.{name}"):
            self._allowed = arguments.get("allow_code_execution", False)
            settings = settings_of(config, self._allowed)
        self._sha256 = settings_sha256(settings)
        self._fixed_shots = settings.get("num_fewshot")
        self._settings = overridden(settings, config)
        vars(self).update(output_type=settings.get("output_type") or "generate_until")
        self._theirs: Any = None  # lm-eval's task object, once loaded
        self._lm_instances: dict[int, list[Any]] = {}  # id of a document -> lm-eval's Instances
        self._after_load = RandomNumbers()
        super().__init__(name, config, **arguments)

    def problems(self) -> list[str]:
        return list(problems(self._settings, self.config, self._fixed_shots, self._allowed))

    def _read_rows(self) -> None:
        local = local_rows(self._settings, self.config.dataset, self._data_dir, self.num_fewshot)
        numbers = RandomNumbers()
        with numbers.used():
            self._theirs = build(
                with_dataset(self._settings, self.config),
                None if local is None else {split: rows.rows for split, rows in local.items()},
            )
        self._after_load = numbers
        self._theirs.set_config(key="num_fewshot", value=self.num_fewshot)
        with quiet():
            self.docs = list(self._theirs.eval_docs)
        if not self.docs or not isinstance(self.docs[0], dict):
            raise ConfigError("lm-eval's task has no documents, or such as are no mappings")
        self.version = getattr(self._theirs, "VERSION", None)
        self._rows = self._rows_of(local, evaluated_split(self._settings), self.docs)
        if self.num_fewshot and (pool := exemplar_split(self._settings)) is not None:
            self._exemplar_rows = self._rows_of(local, pool, [])
        self.clusters = cluster_names(Rows(self.docs, self._rows.source), self.config, self.name)

    def _check_rows(self, limit: int | None) -> None:
        """lm-eval has made the documents, and makes their texts when the requests are built."""

    def _rows_of(self, local: Mapping[str, Rows] | None, split: str | None, otherwise: list[Doc]) -> Rows:
        """A split's rows before lm-eval processes them; the run's identity hashes these."""
        if local is not None and split is not None and split in local:
            return local[split]
        name = "/".join(str(part) for part in (self.config.dataset.path, self.config.dataset.name) if part)
        try:
            table = self._theirs.dataset[split]
            rows = [dict(row) for row in table]
        except (AttributeError, KeyError, TypeError, ValueError):  # the task's class keeps data of its own kind
            return Rows(otherwise, f"lm-eval:{name}")
        files = getattr(table, "cache_files", None)
        commit = Path(files[0]["filename"]).parent.name if files else ""
        return Rows(rows, f"hub:{name}", commit if len(commit) == 40 else None)

    def instances(self, limit: int | None = None, see: See | None = None) -> list[list[Instance]]:
        assert self._theirs is not None, "load() first"
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit} must be at least 1 document (null: all)")
        shown: dict[str, list[str]] = {}  # prompt that the chat template wrote -> the texts of its messages
        with named_errors(f"tasks.{self.name}"):
            requests = self._requests(limit, shown)
            built = [self._instances_of(doc_id, lm_instances) for doc_id, lm_instances in enumerate(requests)]
        for doc_id, instances in enumerate(built if see is not None else []):
            for instance in instances:
                for text in (*shown.get(instance.context, [instance.context]), instance.continuation):
                    assert see is not None
                    see(doc_id, text)
        return built

    def _requests(self, limit: int | None, shown: dict[str, list[str]]) -> list[list[Any]]:
        """lm-eval's Instances of each document, in the order in which it scores them."""
        self._theirs.set_fewshot_seed(self._fewshot_seed)
        if (sampler := copy(getattr(self._theirs, "sampler", None))) is not None:
            sampler.rnd = copy(sampler.rnd)  # `set_fewshot_seed` gave it one
        try:
            with quiet(), RandomNumbers(self._after_load.state).used():
                self._theirs.build_all_requests(
                    limit=limit,
                    system_instruction=self._instruction,
                    apply_chat_template=self._chat is not None,
                    fewshot_as_multiturn=self._multiturn,
                    chat_template=None if self._chat is None else self._template(shown),
                )
        except ConfigError:
            raise
        except Exception as error:  # the task's own code and templates may raise anything
            raise ConfigError(f"lm-eval cannot write its prompts: {one_line(error)}") from error
        by_document: dict[int, list[Any]] = defaultdict(list)
        for instance in self._theirs.instances:
            by_document[instance.doc_id].append(instance)
        ordered = [sorted(by_document[doc_id], key=lambda instance: instance.idx) for doc_id in sorted(by_document)]
        self._lm_instances = {id(doc): lm_instances for doc, lm_instances in zip(self.docs, ordered, strict=False)}
        self.own_exemplars = self._count_own_exemplars(sampler, len(ordered))
        return ordered

    def _count_own_exemplars(self, sampler: Any, count: int) -> int:
        """How many of the first `count` prompts contain their own document. sampler: a copy of lm-eval's from before it
        drew their exemplars, which draws them again. 0 where lm-eval draws none, or excludes the document."""
        few = getattr(self._theirs, "fewshot_cfg", None)
        if not self.num_fewshot or sampler is None or few is None or few.split == self._theirs.config.test_split:
            return 0
        own = 0
        for doc in self.docs[:count]:
            with suppress(ValueError):  # arrays in rows of the task's own code have no one truth value
                own += doc in sampler.sample(n=self.num_fewshot)
        # A task's class may draw in its own way, or not at all.
        return own if sampler.rnd.getstate() == self._theirs.sampler.rnd.getstate() else 0

    @property
    def other_exemplars(self) -> str:
        test = self._settings.get("test_split")
        if test is None:  # lm-eval then excludes nothing, whatever the split
            return f"set tasks.{self.name}.fewshot_split=SPLIT for other rows"
        return (
            f"set tasks.{self.name}.fewshot_split={test} to exclude it (this draws other exemplars), or name another "
            "split there"
        )

    def warnings(self, count: int) -> Iterator[str]:
        settings = self._settings
        text, choices = settings.get("doc_to_text"), settings.get("doc_to_choice")
        if isinstance(text, str) and "{" in text and getattr(self._theirs, "multiple_input", False):
            yield index_warning(f"tasks.{self.name}", str(self._theirs.doc_to_text(self.docs[0])))
        yield from literal_warnings(f"tasks.{self.name}", choices)
        yield from super().warnings(count)

    def _template(self, shown: dict[str, list[str]]) -> Callable[..., str]:
        chat: Any = self._chat

        def render(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            prompt: str = chat(messages) if add_generation_prompt else chat.continued(messages)
            shown[prompt] = [message["content"] for message in messages]
            return prompt

        return render

    def _instances_of(self, doc_id: int, requests: list[Any]) -> list[Instance]:
        instances: list[Instance] = []
        for index, request in enumerate(requests):
            kind, (context, *rest) = request.request_type, request.args
            instance = Instance(self.name, doc_id, index, kind, context)
            if kind == "loglikelihood":
                instance = replace(instance, continuation=rest[0])
            elif kind == "generate_until":
                if problems := list(generation_kwargs_problems(rest[0])):
                    raise ConfigError(problems)
                instance = replace(instance, generation=resolved(rest[0]))
            instances.extend(replace(instance, repeat=repeat) for repeat in range(request.repeats or 1))
        return instances

    def _answered(self, doc: Doc, responses: list[Response]) -> list[Any]:
        """lm-eval's Instances of the document, with the responses and what lm-eval's filters made of them."""
        waiting, answered = iter(responses), []
        for lm_instances in self._lm_instances[id(doc)]:
            resps = [next(waiting).plain(lm_instances.request_type) for _ in range(lm_instances.repeats or 1)]
            answered.append(replace(lm_instances, resps=resps, filtered_resps={}))
        for ensemble in self._theirs._filters:
            ensemble.apply(answered)
        return answered

    @property
    def filters(self) -> tuple[str, ...]:
        return tuple(ensemble.name for ensemble in self._theirs._filters)

    def filtered(self, doc: Doc, responses: list[Response]) -> dict[str, list[Any]]:
        answered = self._answered(doc, responses)
        return {name: [instance.filtered_resps[name] for instance in answered] for name in self.filters}

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        with quiet(), RandomNumbers().used():  # some scorers draw: every document starts from the same seeds
            scored: dict[str, MetricValue] = self._theirs.process_results(doc, answers)
        return scored

    def aggregation(self) -> Mapping[str, str | Aggregation]:
        return aggregations(self._theirs.aggregation())

    def higher_is_better(self) -> dict[str, bool]:
        return {name: better for name, better in self._theirs.higher_is_better().items() if better is not None}

    def definition(self) -> dict[str, Any]:
        return {"lm_eval": lm_eval_version(), "task": self._settings["task"], "sha256": self._sha256}

    def fingerprint(self, limit: int | None = None) -> dict[str, Any]:
        """As of any task, but all rows are hashed where lm-eval processes them: only its own code knows which rows the
        first `limit` documents are made of."""
        facts = super().fingerprint(limit)
        if self._settings.get("process_docs") is not None and self._rows is not None:
            facts.update(rows=len(self.docs[:limit]), sha256=content_hash(self._rows.rows))
        return {**facts, "split": evaluated_split(self._settings), "definition": self.definition()}

    def question(self, doc: Doc) -> str:
        return str(self._theirs.doc_to_text(doc))

    def target(self, doc: Doc) -> Any:
        return self._theirs.doc_to_target(doc)

    def requests(self, doc_id: int, doc: Doc, prompts: list[str]) -> list[Instance]:
        return self._instances_of(doc_id, self._lm_instances[id(doc)])

    @classmethod
    def metrics_of(cls, config: TaskConfig) -> dict[str, Metric]:
        names = metric_names(leaf_of(config.lm_eval.name).outline) if config.lm_eval.name else ["?"]
        return dict.fromkeys(names, Metric())


def aggregations(functions: Mapping[str, Any]) -> dict[str, str | Aggregation]:
    """Metric -> the name of the harness's own aggregation if it is the same, else lm-eval's function."""
    from lm_eval.api import metrics

    own = {getattr(metrics, name): name for name in SAME}
    return {metric: own.get(function) or _theirs(metric, function) for metric, function in functions.items()}


def _theirs(metric: str, function: Callable[[list[Any]], Any]) -> Aggregation:
    def value(items: list[Any]) -> Any:
        with quiet():
            total = function(items)
        return total.item() if hasattr(total, "item") else total

    def stderr(items: list[Any], iterations: int) -> float | None:
        from lm_eval.api import metrics

        count = min(iterations, 100) if metric in FEW else iterations
        with quiet():
            error = metrics.stderr_for_metric(metric=function, bootstrap_iters=count)
            if error is None:
                return None
            closed = getattr(metrics, error.__name__, None) is error  # else its lambda, which bootstraps by processes
            return float(error(items)) if closed else bootstrap_stderr(function, items, count)

    return Aggregation(value, stderr)


def bootstrap_stderr(f: Callable[[list[Any]], float], xs: list[Any], iters: int) -> float:
    """lm-eval's function of this name, draw for draw. Its pool forks a process for each core while threads that may
    hold locks, which stay locked there: a run of `bleu` waited for one for ten minutes."""
    from lm_eval.api.metrics import sample_stddev

    size = min(1000, iters)

    def drawn(seeds: Sequence[int]) -> list[list[float]]:
        return [[f(draw.choices(xs, k=len(xs))) for _ in range(size)] for draw in map(random.Random, seeds)]

    return float(sample_stddev([value for chunk in spread(drawn, range(iters // size), least=1) for value in chunk]))


NOT_OURS = ("tag", "group", "task_list")  # keys of a task's file that are no settings of the task


def build(settings: Mapping[str, Any], rows: Mapping[str, list[Row]] | None) -> Any:
    """lm-eval's task, loaded.

    rows: split -> its rows; None: lm-eval loads them itself, from the Hub or wherever the task's file says.
    Raises ConfigError: the rows cannot be had, a package is missing, or the task's own code fails on the rows.
    """
    import datasets

    own_settings = {key: value for key, value in settings.items() if key not in NOT_OURS}
    if own_settings.get("process_docs") is not None:
        own_settings["process_docs"] = _once_a_split(own_settings["process_docs"])
    bars, caching = datasets.is_progress_bar_enabled(), datasets.is_caching_enabled()
    try:
        datasets.disable_progress_bars()
        datasets.disable_caching()  # the cache may hold rows that an earlier process shuffled with other seeds
        with quiet():
            if rows is not None:
                return _constructed(own_settings, {split: _dataset(table, split) for split, table in rows.items()})
            with offline_if_unreachable():
                return _constructed(own_settings, None)
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"lm-eval's task needs a package that is not installed: {error}") from error
    except Exception as error:  # `datasets`, the Hub's client and the task's own code may raise anything
        raise ConfigError(_not_built(own_settings, one_line(error), rows is not None)) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
        if caching:
            datasets.enable_caching()


def _not_built(settings: Mapping[str, Any], reason: str, local: bool) -> str:
    if local:
        return f"lm-eval cannot make its documents of the local rows: {reason}"
    return (
        f"lm-eval cannot load its rows ({settings.get('dataset_path')}): {reason}. Without a network give them by "
        f"data_dir=FOLDER that holds {settings['task']}/<split>.jsonl, or tasks.NAME.dataset.folder=FOLDER_BELOW"
    )


def _constructed(settings: dict[str, Any], rows: Mapping[str, Any] | None) -> Any:
    """The task, constructed as lm-eval's factory does it: a class of the task's own may take no settings."""
    from lm_eval.api.task import ConfigurableTask

    cls = own = settings.get("class", ConfigurableTask)
    if rows is not None:

        def download(self: Any, *_: Any, **__: Any) -> None:
            import datasets

            self.dataset = datasets.DatasetDict(dict(rows))

        cls = type(own.__name__, (own,), {"download": download, "__module__": own.__module__})
    task = cls(config=settings) if "config" in inspect.signature(cls.__init__).parameters else cls()
    if getattr(task.config, "task", None) != settings["task"]:
        task.config.task = settings["task"]
    return task


def _once_a_split(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Runs `function` once for each split and keeps its result. lm-eval processes a split's documents anew wherever it
    needs them and relies on the cache of `datasets`; without that cache a task that shuffles would score other
    documents than it has requests for."""
    processed_splits: dict[int, tuple[Any, Any]] = {}

    @functools.wraps(function)
    def processed(split: Any) -> Any:
        if id(split) not in processed_splits:
            processed_splits[id(split)] = split, function(split)
        return processed_splits[id(split)][1]

    return processed


def _dataset(rows: list[Row], split: str) -> Any:
    import datasets

    columns = {column: None for row in rows for column in row}
    try:
        return datasets.Dataset.from_list([{**columns, **row} for row in rows])
    except Exception as error:  # pyarrow raises for a column whose values have several types
        raise ConfigError(f"the rows of split '{split}' are no table: {' '.join(str(error).split())[:200]}") from error


def settings_sha256(settings: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a task's settings, with the whole source file of each function that they name. Where the files
    lie does not count."""
    metadata = settings.get("metadata")
    if isinstance(metadata, dict):
        settings = {**settings, "metadata": {key: v for key, v in metadata.items() if key != "config_source"}}
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False, default=_named)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _named(value: Any) -> Any:
    """A JSON value for what JSON cannot write: name and source of a function or class, else the text of the value."""
    function = value.func if isinstance(value, functools.partial) else value
    if not callable(function):
        return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
    described = {"function": getattr(function, "__qualname__", type(function).__name__), "source": _source(function)}
    if isinstance(value, functools.partial):
        described["arguments"] = [list(value.args), dict(value.keywords)]
    return described


def _source(function: Any) -> str | None:
    try:
        file = inspect.getsourcefile(function)
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None
