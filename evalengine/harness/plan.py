"""A run's plan, fixed before anything runs: the tasks' documents, their prompts, and the engine's requests.

The end of the run is rehearsed before its first request: every document is scored and written, with made-up answers. A
row that a task cannot score, or that no file can hold, would otherwise cost the run, and each resumed one; so would a
scorer that needs what the machine lacks. Many scorers look no further at an empty text (IFEval's checks), so a
non-empty answer is tried, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evalengine.config.compose import read_config
from evalengine.config.schema import ClusterConfig, Config, template_date, template_variables
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint, weights_fingerprint
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.request import Request
from evalengine.engine.settings import Settings, settings_problems, uses_ray
from evalengine.engine.submission import check_requests
from evalengine.engine.text.chat_template import ChatTemplate
from evalengine.engine.text.encode import special_tokens
from evalengine.engine.text.pieces import PieceTokenizer
from evalengine.errors import ConfigError, first_of, listed, one_line
from evalengine.harness.identity import deferred_llm, model_identity
from evalengine.harness.judging import Judge, judging_problems, write_rows
from evalengine.harness.metrics import WEIGHTED, summarize
from evalengine.harness.requests import (
    SERVED,
    HarnessRequest,
    Plan,
    RequestBuilder,
    TaskPlan,
    in_order,
    read_requests,
    requests_sha256,
)
from evalengine.models.spec import ModelSpec
from evalengine.records.evidence import CLIENT_REQUESTS, CONFIG
from evalengine.records.sealed import differences
from evalengine.tasks.base import Task, named_errors
from evalengine.tasks.fewshot import Chat
from evalengine.tasks.generation import generation_settings
from evalengine.tasks.instance import MADE_UP, Instance, Response
from evalengine.tasks.metric import MetricKey, MetricValue
from evalengine.tasks.registry import load_task
from evalengine.util.forked import ForkedTask, shares
from evalengine.util.phases import phase
from evalengine.util.plugins import load

COMPUTED_AGAIN = ("resume=auto", "cache=null", "cache.audit=0")  # no answer is read or stored
MANY_DOCUMENTS = 2_000  # documents whose prompts take a second to write, several times what copying them takes
FEW_DOCUMENTS = 200  # documents whose prompts take a tenth of a second; a GPU's model takes longer to load
MOST_REQUESTS = 1 << 32  # requests of one process, which numbers its own
MAX_LISTED = 5  # changed fields of the model that are listed
NAME_IT = "by --with model.path=..."
REHEARSED = 50  # documents that a judge's run is planned of with made-up answers before the first is answered
SHOWN = 10  # problems of one task's documents that are listed


# The tasks' instances, a list per document, and their plan without the tasks. It is data only, so that another process
# can make it.
Prompts = tuple[list[list[list[Instance]]], Plan]


def prepare(config: Config, loaded: Checkpoint | None = None, scores: bool = True) -> tuple[Checkpoint, list[Task]]:
    """Finds the model, reads the tasks' rows and checks the engine's settings, before any weight is loaded.

    loaded: the model, if it is loaded already. scores: whether answers are scored; some tasks run them for that.
    Raises one ConfigError with everything that is wrong with any of them.
    """
    problems: list[str] = []
    with phase("tokenizer"):
        checkpoint = loaded or _collect(problems, lambda: resolve_checkpoint(config.model))
    chat = _collect(problems, lambda: _chat(config, checkpoint)) if checkpoint else None
    loaded_tasks = read_tasks(config, chat, problems)
    spec = checkpoint.spec if checkpoint else None
    problems.extend(engine_problems(config, spec))
    if scores:
        problems.extend([*execution_problems(config, loaded_tasks), *judging_problems(config, loaded_tasks)])
    if spec is not None:
        problems.extend(budget_problems(config, loaded_tasks, spec))
    if checkpoint is not None and checkpoint.tokenizer is None:
        problems.append("model.tokenizer: this model has no tokenizer (load_format=dummy); name one to run tasks on it")
    if problems:
        raise ConfigError(problems)
    assert checkpoint is not None
    return checkpoint, loaded_tasks


def engine_problems(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    """Yield what is wrong with the settings of the engine and its replicas, a sentence each. On a remote Ray cluster
    the first replica checks its engine's settings, since a different machine computes."""
    if uses_ray(config):
        yield from load("evalengine.integrations.ray.pool:ray_problems")(config)
    elif config.cluster.audit > 0:
        audit = f"cluster.audit={config.cluster.audit}"
        yield f"{audit}: it needs a second replica, and this machine's GPUs suffice for one"
    if config.cluster.address is None:
        yield from settings_problems(config.engine, config.batch_invariant, config.numerics, spec)


def _chat(config: Config, checkpoint: Checkpoint | None = None) -> ChatTemplate | None:
    """The model's chat template with the run's variables; None for a run whose prompts use none.

    checkpoint: the model, where it has been found already. Raises ConfigError for a variable that the template does not
    read: it would change nothing, in silence.
    """
    date = template_date(config)
    if date is None:
        return None
    args = template_variables(config)
    template = ChatTemplate((checkpoint or resolve_checkpoint(config.model)).tokenizer, date, variables=args)
    if unread := sorted(args.keys() - template.reads()) if args else []:
        problems = []
        for name in unread:
            setting = f"chat_template_args.{name}" if name in (config.chat_template_args or {}) else name
            problems.append(f"{setting}={json.dumps(args[name])}: the model's chat template does not read it; leave it "
                            "null, or take a model whose template does")  # fmt: skip
        raise ConfigError(problems)
    return template


def load_tasks(config: Config) -> list[Task]:
    """The tasks with their rows. Of the model only the chat template is read, if the prompts use one.

    Raises one ConfigError with everything that is wrong with any of them.
    """
    problems: list[str] = []
    tasks = read_tasks(config, _collect(problems, lambda: _chat(config)), problems)
    if problems:
        raise ConfigError(problems)
    return tasks


@phase("rows")
def read_tasks(config: Config, chat: Chat | None, problems: list[str]) -> list[Task]:
    """Return the tasks whose rows can be read, and add what is wrong with the rows to `problems`."""
    tasks: list[Task] = []
    for name, settings in config.tasks.items():
        try:
            task = load_task(
                name,
                settings,
                data_dir=config.data_dir,
                fewshot_seed=config.fewshot_seed,
                chat=chat,
                fewshot_as_multiturn=config.fewshot_as_multiturn,
                system_instruction=config.system_instruction,
                allow_code_execution=config.allow_code_execution,
            )
            task.read()
            tasks.append(task)
        except ConfigError as error:
            problems.extend(error.problems)

    def check() -> list[str]:
        found: list[str] = []
        for task in tasks:
            _collect(found, partial(task.check, config.limit))
        return found

    with ForkedTask(check, worthwhile=False, limited=any(task.needs_limits for task in tasks)) as checked:
        problems.extend(checked.result())
    return tasks


def build_plan(config: Config, tasks: list[Task], llm: EngineProtocol) -> Plan:
    """All prompts of all documents, in document order, and their requests.

    Raises ConfigError for prompts and requests that can never run (RequestBuilder, `check_requests`), which the engine
    would refuse too, but only once the run has a folder; and for documents that cannot be scored (`rehearse`).
    """
    return _plan(tasks, [_write_prompts(config, llm.checkpoint.tokenizer, llm.facts().settings, tasks)], llm)


def plan_and_load(config: Config, tasks: list[Task], llm: EngineProtocol) -> Plan:
    """`build_plan`; an engine whose weights are not loaded yet loads them, if no cache may spare it that. Forked
    processes write the prompts of many documents meanwhile. Raises what `build_plan` and loading raise."""
    engine = llm.facts()
    if engine.loaded or config.cache.path is not None:
        return build_plan(config, tasks, llm)
    enough = FEW_DOCUMENTS if engine.settings.device.type == "cuda" else MANY_DOCUMENTS
    sizes = [len(task.docs[: config.limit]) for task in tasks]
    # A chat template runs in a dedicated process, which only one other process may use.
    may_fork = not config.apply_chat_template and sum(sizes) >= enough and all(task.can_fork for task in tasks)
    problems, write = list[str](), partial(_write_prompts, config, llm.checkpoint.tokenizer, engine.settings)
    with ExitStack() as started:
        parts = shares(tasks, MANY_DOCUMENTS, sizes) if may_fork else [tasks]
        works = [partial(write, part, number * MOST_REQUESTS) for number, part in enumerate(parts)]
        writing = [started.enter_context(ForkedTask(work, may_fork)) for work in works]
        llm.load()
        written = [_collect(problems, process.result) for process in writing]
        if problems:
            raise ConfigError(problems)
        return _plan(tasks, written, llm)


@phase("plan")
def _plan(tasks: list[Task], written: Sequence[Prompts], llm: EngineProtocol) -> Plan:
    parts = [part for _, part in written]
    requests = [*chain.from_iterable(part.requests for part in parts)]
    check_requests([item.request for item in requests], llm.facts().limits, request_names(requests))
    return Plan(
        [TaskPlan(*pair) for pair in zip(tasks, chain.from_iterable(own for own, _ in written), strict=True)],
        requests,
        warnings=(*chain.from_iterable(part.warnings for part in parts),),
        own_exemplars=sum(part.own_exemplars for part in parts),
        special_documents=sum(part.special_documents for part in parts),
        prompts_sha256=requests_sha256((item.key, item.request) for item in requests),
    )


@phase("prompts")
def _write_prompts(
    config: Config, tokenizer: Any, settings: Settings, tasks: Sequence[Task], first_id: int = 0
) -> Prompts:
    pattern, special = special_tokens(tokenizer), set[tuple[str, int]]()

    def see(task: Task, document: int, text: str) -> None:
        if pattern is not None and pattern.search(text):
            special.add((task.name, document))

    written, warnings = [], list[str]()
    for task in tasks:
        instances = task.instances(config.limit, partial(see, task))
        rehearse(task, instances)
        written.append(instances)
        warnings.extend(task.warnings(len(instances)))
    every = [*chain.from_iterable(chain.from_iterable(instances) for instances in written)]
    pieces = PieceTokenizer(tokenizer)
    pieces.learn((instance.context, instance.continuation) for instance in every)
    builder = RequestBuilder(
        pieces,
        settings.max_model_len,
        config.seed,
        config.long_prompts,
        config.model.think_end_token,
        config.logprobs or 0,
    )
    own = sum(task.own_exemplars for task in tasks)
    return written, Plan([], builder.build(every, first_id), tuple(warnings), own, len(special))


def rehearse_judge(judge: Judge | None, plan: Plan) -> None:
    """Raise ConfigError for requests that the judge cannot answer, as where its chat template rejects a conversation.

    The first documents are planned with made-up answers. A judge behind an API is not tried.
    """
    if judge is None or judge.engine is None:
        return
    with TemporaryDirectory() as place, named_errors("judge"):
        for name, rows in judge.rows(plan, lambda key: MADE_UP).items():
            write_rows(Path(place) / f"{name}.jsonl", [*rows.values()][:REHEARSED])
        config = replace(judge.config, data_dir=place)
        build_plan(config, prepare(config, judge.engine.checkpoint)[1], judge.engine)


def config_again(folder: Path, pinned: Mapping[str, Any], words: Sequence[str]) -> Config:
    """The configuration of the run in `folder`, for one process that reads and keeps no answers.

    pinned: fields of the engine's settings that are not the file's. words: settings that hold over both.
    """
    given = {word.lstrip("+").partition("=")[0] for word in words}
    settings = {f"engine.{name}": "null" if value is None else value for name, value in pinned.items()}
    pins = [f"{name}={value}" for name, value in settings.items() if name not in given]
    served = (folder / CLIENT_REQUESTS).exists()
    config = read_config(folder / CONFIG, (*COMPUTED_AGAIN, *pins, *words), selects=not served)
    return replace(config, cluster=ClusterConfig())


def plan_again(
    name: str, identity: Mapping[str, Any], config: Config, folder: Path, same_model: bool = True
) -> tuple[Plan, LLM]:
    """The plan of the run called `name`, whose recorded identity is given, and an engine without weights yet.

    folder: the run's, which holds the requests of a server. same_model: whether the model must be the run's. Raises
    ConfigError for weights (whose files it hashes), a model or requests that are not the run's.
    """
    served = identity.get("harness") == SERVED
    checkpoint, tasks = (resolve_checkpoint(config.model), []) if served else prepare(config, scores=False)
    if same_model and weights_fingerprint(checkpoint) != identity["weights"]:
        raise ConfigError(f"{checkpoint.source}: these are not the weights of {name}; name them {NAME_IT}")
    llm = deferred_llm(config, checkpoint)
    now = model_identity(config, checkpoint) if same_model else {}
    pairs = [(identity[part], value, part) for part, value in now.items() if part in identity]
    if changed := [words for pair in pairs for words in differences(*pair)]:
        raise ConfigError(
            f"{checkpoint.source}: no longer the model of {name}: {'; '.join(changed[:MAX_LISTED])}; restore its "
            f"configuration, or name the run's own model {NAME_IT}"
        )
    if served:
        requests = in_order(read_requests(folder))
        plan = Plan([], requests, prompts_sha256=requests_sha256((item.key, item.request) for item in requests))
    else:
        plan = build_plan(config, tasks, llm)
    if plan.prompts_sha256 != identity["prompts"]:
        raise ConfigError(
            f"{name}: the rows, the tokenizer or the prompts made of them are no longer the run's; name the run's own "
            f"by --with data_dir=... or --with model.path=..."
        )
    return plan, llm


def request_names(requests: list[HarnessRequest]) -> Callable[[Request], str]:
    """A function that gives the name of a request in messages."""
    names = {item.request.request_id: f"{item.key[0]}, document {item.key[1]}" for item in requests}
    return lambda request: names[request.request_id]


def _collect(problems: list[str], action: Callable[[], Any]) -> Any:
    try:
        return action()
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def budget_problems(config: Config, tasks: Sequence[Task], spec: ModelSpec) -> Iterator[str]:
    """Yields a sentence for each budget that leaves no room for a prompt, for each task that a thinking model cannot
    answer, and for an end of thinking that is no token."""
    room = config.engine.max_model_len or spec.max_position_embeddings
    end = config.model.think_end_token
    if isinstance(end, int) and end >= spec.vocab_size:
        yield f"model.think_end_token={end}: token ids must be in 0 ... {spec.vocab_size - 1}"
    for task in tasks:
        if task.output_type == "generate_until":
            max_gen_toks = generation_settings(task.config.generation, task.fewshot_delimiter).max_gen_toks
            if max_gen_toks >= room:
                most = spec.max_position_embeddings
                fix = f"lower it, or raise engine.max_model_len (at most {most}, the model's own)"
                if room >= most:
                    fix = "lower it: that is the model's own limit"
                yield (
                    f"tasks.{task.name}.generation.max_gen_toks={max_gen_toks} leaves no room for a prompt in "
                    f"engine.max_model_len={room}; {fix}"
                )
        elif config.enable_thinking:
            yield (
                f"tasks.{task.name}: it scores given texts, and enable_thinking=true has the model think before it "
                "answers: scores of an answer after no thinking mean nothing; leave enable_thinking null for it"
            )


def rehearse(task: Task, instances: Sequence[Sequence[Instance]]) -> None:
    """Raises ConfigError that names the documents which could not be scored or written.

    instances: the requests of each document.
    """
    values, failed = [], dict[str, list[int]]()  # what was raised -> the documents
    for doc_id, requests in enumerate(instances):
        try:
            values.append(_scored(task, doc_id, list(requests)))
        except Exception as error:  # the task's own code may raise anything
            failed.setdefault(one_line(error), []).append(doc_id)
    problems = [
        f"tasks.{task.name}: document {listed([*map(str, documents)], 1)} cannot be scored or written ({reason})"
        for reason, documents in failed.items()
    ]
    weighted = [] if problems else [key for key in values[0] if task.aggregation().get(key[0]) in WEIGHTED]
    if empty := {key[0] for key in weighted if sum(v[key][1] for v in values if key in v) == 0}:
        problems.append(
            f"tasks.{task.name}: the {len(values)} evaluated documents are empty, and {', '.join(sorted(empty))} would "
            "divide by their words or bytes: give documents with text, or raise limit"
        )
    if problems:
        raise ConfigError(first_of(problems, SHOWN, "more reasons"))
    try:
        summarize(task, values, bootstrap_iterations=1000)
    except Exception as error:  # the task's own aggregation may raise anything
        raise ConfigError(f"tasks.{task.name}: its documents' scores cannot be added up ({one_line(error)})") from error


def _scored(task: Task, doc_id: int, requests: list[Instance]) -> dict[MetricKey, MetricValue]:
    """The scores of a made-up answer, after those of an empty one, which must exist as well."""
    doc, target = task.docs[doc_id], task.target(task.docs[doc_id])
    if len({(request.index, request.repeat) for request in requests}) < len(requests):
        raise ValueError("two of its requests have the same index and repeat; number them from 0")
    values = task.process_results(doc, [Response() for _ in requests])
    if any(request.kind == "generate_until" for request in requests):
        values = task.process_results(doc, [Response(text=MADE_UP) for _ in requests])
    json.dumps([doc, str(target)], ensure_ascii=False, default=str).encode("utf-8")
    return values


def isolated(config: Config) -> bool:
    """Whether programs are isolated from network, files and other processes."""
    return config.allow_code_execution != "without_isolation"


def execution_problems(config: Config, tasks: Sequence[Task]) -> Iterator[str]:
    """Yields a sentence if tasks would run programs that may not be run, or cannot be run here."""
    names = [task.name for task in tasks if task.runs_programs]
    if not names:
        return
    programs = f"{', '.join(names)} {'run' if len(names) > 1 else 'runs'} programs that the model wrote"
    if not config.allow_code_execution:
        yield (
            f"allow_code_execution=false: {programs}; allow_code_execution=true runs them in their own processes, "
            "within limits, without network, your files or your environment (tasks/README.md says what that does not "
            "protect against)"
        )
    elif why := load("evalengine.integrations.sandbox.run:problem")(isolated(config)):
        yield f"allow_code_execution={str(config.allow_code_execution).lower()}: {programs}, and {why}"
