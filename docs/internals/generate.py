"""Writes protocol.md from the code: `make docs`. tests/unit/test_docs.py compares.

Theory of operation. What the code has as data (gates of phases, unions of messages, states) is read
from the imported modules. What it has as code (who sends a command, when a timer is due, what an
agent does about an input) is read from the syntax tree, by the shapes that the core keeps to. Where
a shape is not found any more this fails: an empty table would look like a fact.

The words of a table are the docstrings of the classes and functions it is about, and the one table
that only a docstring has (the rows of an attempt, in phases.py) is compared with the code first.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from syntax import (
    Function,
    called,
    constants,
    core_functions,
    functions_of,
    made_in,
    makers,
    name_of,
    sentences,
    settings,
    words,
)

from keepstep.core import facts, migration, phases, planned, rewire, state, timers
from keepstep.core.agent import machine
from keepstep.model import agent_messages, blob_messages, commands, messages, records, vault, views
from keepstep.model import job as inputs

PAGE = Path(__file__).with_name("protocol.md")
COMMANDS = typing.get_args(commands.WorkerCommand) + typing.get_args(agent_messages.AgentCommand)
ANSWERS = typing.get_args(messages.WorkerMessage) + typing.get_args(agent_messages.AgentMessage)

# How the rows' words for whom they ask appear in a diagram.
ACTORS = {
    "members": ["members"],
    "newcomers": ["newcomers"],
    "leavers": ["members"],  # a planned move only: others have no living ones
    "everyone": ["members", "newcomers"],
    "an agent not hit": ["agent"],
    "a parked spare": ["newcomers"],
}

HEAD = """\
# The protocol of a migration

Generated from the code by `make docs`; do not edit. The [glossary](../reference/glossary.md)
explains the words, [concepts](../concepts) the reasons, and [guarantees](guarantees.md) say what
holds under which faults. A name like `faults.give_up_node` is a function in
`src/keepstep/core/faults.py`.
"""


def seconds(ns: int) -> str:
    return f"{ns / state.SECOND:g} s"


# ------------------------------------------------------------------ printing


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    if not cells:
        raise AssertionError(f"nothing was found for the table {head}")
    lines = [list(head), ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def mermaid(lines: Iterable[str]) -> str:
    return "\n".join(["```mermaid", *lines, "```", ""])


# ------------------------------------------------------------------ phases


def gates(kind: str) -> list[tuple[str, list[Any]]]:
    before = [(name, list(found)) for name, found in phases.PHASES[typing.cast(Any, kind)]]
    return before + [("COMMIT", [])] + [(name, [gate]) for name, gate in rewire.FORWARD]


def phase_section() -> Iterator[str]:
    yield "## Phases\n"
    yield (
        "The phase of an attempt is the first one that has a shut gate; the core finds it anew "
        "after every event.\nBefore COMMIT the phase can go back, and an attempt can be undone or "
        "replaced by the next; after COMMIT\nthere is only forward. RETIRE is left at once.\n"
    )
    every = [gate for kind in phases.PHASES for _, found in gates(kind) for gate in found]
    unique = dict.fromkeys(every)
    yield table(["gate", "open when"], [(f"`{g.__name__}`", words(g)) for g in unique])
    kinds = list(phases.PHASES)
    rows = []
    for index, (phase, _) in enumerate(gates(kinds[0])):
        cells = [", ".join(f"`{g.__name__}`" for g in gates(kind)[index][1]) for kind in kinds]
        rows.append([phase, *(cell or "`Committed` is durable" for cell in cells)])
    yield "What opens the way out of each phase:\n"
    yield table(["phase", *kinds], rows)
    for kind in kinds:
        yield f"### {kind.capitalize()}\n"
        yield mermaid(phase_diagram(kind))


def phase_diagram(kind: str) -> Iterator[str]:
    yield "stateDiagram-v2"
    found = gates(kind)
    yield f"    [*] --> {found[0][0]}: AttemptStarted"
    follow = [name for name, _ in found[1:]] + ["RETIRE"]
    for (phase, opened), following in zip(found, follow):
        why = ", ".join(gate.__name__ for gate in opened) or "Committed is durable"
        yield f"    {phase} --> {following}: {why}"
    yield "    RETIRE --> [*]"


# ------------------------------------------------------------------ rows


class Row(NamedTuple):
    command: str
    to: str
    when: str
    answer: str


def told_rows() -> dict[str, Row]:
    """The table of rows in the docstring of phases.py, by command."""
    lines = (phases.__doc__ or "").splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["command", "to"])
    head = lines[start]
    edges = [head.index(word) for word in ("command", "to  ", "as soon as", "answered by")]
    rows = {}
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        ends = [*edges[1:], len(line)]
        row = Row(*(line[left:right].strip() for left, right in zip(edges, ends)))
        rows[row.command] = row
    for row in rows.values():
        known = {one.__name__ for one in ANSWERS}
        wrong = [one for one in re.findall(r"[A-Z]\w+", row.answer) if one not in known]
        if wrong or any(one not in ACTORS for one in row.to.split(", ")):
            raise AssertionError(f"phases.py: the row {row} names what does not exist")
    return rows


def asked_rows(driver: Any, *modules: ModuleType) -> list[tuple[str, str]]:
    """Which functions the driver of an attempt calls, and which command each one sends."""
    known = {one.tree.name: one for module in modules for one in functions_of(module)}
    rows = []
    for call in called(known[driver.__name__].tree):
        row = known.get(name_of(call))
        rows += [(row.name, one) for one in made_in(row.tree, COMMANDS)] if row is not None else []
    return rows


def row_section() -> Iterator[str]:
    told = told_rows()
    behind = list(_behind_commit())
    alive = [(name, one) for name, one in behind if told[one].to != "leavers"]
    drivers = {
        "unplanned and resume": asked_rows(migration.recover, migration) + alive,
        "planned": asked_rows(planned.move, planned, migration) + behind,
    }
    asked = {command for rows in drivers.values() for _, command in rows}
    if asked != set(told):
        raise AssertionError(f"phases.py: its docstring and its rows differ: {asked ^ set(told)}")
    yield "## Who is asked for what\n"
    yield (
        "After every event the core goes through the rows in this order. Each row asks everybody "
        "who can be\nasked and has not been. Commands carry the generation of the attempt and can "
        "be repeated. In a planned\nattempt the members keep their old connections while they "
        "build new ones; a resume from a checkpoint\nhas no members. A planned attempt that is "
        "undone ends with `Release` to all members.\n"
    )
    for title, rows in drivers.items():
        yield f"### {title.capitalize()}\n"
        cells = [
            (f"`{name}`", f"`{c}`", told[c].to, told[c].when, told[c].answer) for name, c in rows
        ]
        yield table(["row", "command", "to", "as soon as", "answered by"], cells)
        yield mermaid(row_diagram([told[command] for _, command in rows]))


def _behind_commit() -> Iterator[tuple[str, str]]:
    worker = typing.get_args(commands.WorkerCommand)
    seen: set[str] = set()
    for one in functions_of(rewire):
        made = [command for command in made_in(one.tree, worker) if command not in seen]
        seen.update(made)
        yield from ((one.name, command) for command in made)


def row_diagram(rows: Sequence[Row]) -> Iterator[str]:
    yield "sequenceDiagram"
    actors = ["orchestrator", "agent", "members", "newcomers"]
    yield from (f"    participant {actor}" for actor in actors)
    for row in rows:
        if row.command == "Swap":
            yield "    Note over orchestrator: COMMIT, the record is durable"
        optional = row.command == "Checkpoint"
        if optional:
            yield f"    opt {row.when}"
        to = [actor for one in row.to.split(", ") for actor in ACTORS[one]]
        yield from (f"    orchestrator->>{actor}: {row.command}" for actor in to)
        only = re.search(r"\((\w+)\)", row.answer)
        by = [only[1]] if only else to
        answer = re.sub(r" \(\w+\)", "", row.answer)
        yield from (f"    {actor}-->>orchestrator: {answer}" for actor in by)
        if optional:
            yield "    end"


# ------------------------------------------------------------------ timers


def timer_section() -> Iterator[str]:
    yield "## What happens if nothing happens\n"
    yield (
        "Every wait of the core is a row; the earliest one is the core's deadline. `stall_ns` is "
        "the job's stall\ntimeout, from which the other times follow. `settle` only makes the core "
        "look again.\n"
    )
    fired = dict(_fired())
    due = list(_due())
    missing = {what for what, _ in due} - set(fired) - {"settle"}
    if missing:
        raise AssertionError(f"timers.py: nothing is done about {missing}")
    rows = [(f"`{what}`", f"`{when}`", fired.get(what, "")) for what, when in due]
    yield table(["timer", "due", "then"], rows)
    limits = [(n, v) for n, v in vars(timers).items() if n.endswith("_NS") and isinstance(v, int)]
    yield table(["limit", "is"], [(f"`{name}`", seconds(value)) for name, value in sorted(limits)])
    properties = [one for one in functions_of(state) if one.tree.name in ("reply_ns", "build_ns")]
    properties += [one for one in functions_of(timers) if one.tree.name == "_reply_ns"]
    yield table(["time", "is", "why"], [_time(one.tree) for one in properties])


def _time(tree: ast.FunctionDef) -> tuple[str, str, str]:
    value = next(one.value for one in ast.walk(tree) if isinstance(one, ast.Return) and one.value)
    return f"`{tree.name}`", f"`{ast.unparse(value)}`", ast.get_docstring(tree) or ""


def _due() -> Iterator[tuple[str, str]]:
    """(timer, when) of every row that timers.py can give."""
    for function in functions_of(timers):
        nodes = [node for node in ast.walk(function.tree) if isinstance(node, ast.expr)]
        local = _locals(function.tree)
        for node in sorted(nodes, key=lambda one: (one.lineno, one.col_offset)):
            if isinstance(node, ast.Tuple) and len(node.elts) == 3:
                when, what, _ = node.elts
                if isinstance(what, ast.Constant) and not isinstance(when, ast.Constant):
                    yield str(what.value), local.get(ast.unparse(when), ast.unparse(when))
            elif isinstance(node, ast.Call) and name_of(node) == "_since":
                asked, limit, what = node.args[2], node.args[4], node.args[5]
                since = "".join(constants(asked)) or "abort, decide or swap"
                yield ast.literal_eval(what), f"{since} asked + {_short(limit, local)}"


def _locals(tree: ast.FunctionDef) -> dict[str, str]:
    """What a name stands for that is given a value once."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return {ast.unparse(one.targets[0]): ast.unparse(one.value) for one in found}


def _short(limit: ast.expr, local: dict[str, str]) -> str:
    return local.get(ast.unparse(limit), ast.unparse(limit)).split("(")[0]


def _fired() -> Iterator[tuple[str, str]]:
    """What the branches `what == "..."` do: the functions they call."""
    for function in functions_of(timers):
        if not function.tree.name.startswith("_fire"):
            continue
        for node in ast.walk(function.tree):
            test = node.test if isinstance(node, ast.If) else None
            if not isinstance(node, ast.If) or not isinstance(test, ast.Compare):
                continue
            if ast.unparse(test.left) != "what" or not isinstance(test.ops[0], ast.Eq):
                continue
            what = constants(test)[0]
            yield what, _deed(node.body)
            only_else = node.orelse and not isinstance(node.orelse[0], ast.If)
            if only_else and function.tree.name == "_fire_worker":
                yield "member", _deed(node.orelse)


def _deed(body: Sequence[ast.stmt]) -> str:
    skipped = {"get", "pop", "values"}
    calls = [call for one in body for call in called(one) if name_of(call) not in skipped]
    names = dict.fromkeys(ast.unparse(call.func) for call in calls if name_of(call) != "members")
    if not names:
        return "; ".join(f"`{ast.unparse(one)}`" for one in body)
    said = [text for one in body for text in sentences(one)]
    return ", ".join([*(f"`{name}`" for name in names), *(f'"{text}"' for text in said)])


# ------------------------------------------------------------------ states


def state_section() -> Iterator[str]:
    functions = [one for one in core_functions() if one.module != "project"]  # views, not states
    node = typing.get_type_hints(facts.Node)["state"]
    mode = typing.get_type_hints(state.Job)["mode"]
    outcome = typing.get_type_hints(views.IncidentView)["outcome"]
    yield "## States\n"
    yield "All states that a thing can be in, and who puts it there.\n"
    closing = [
        one
        for one in functions
        if any(name_of(call) == "close_incident" for call in called(one.tree))
    ]
    for title, attribute, values in (
        ("Roles of a worker", "role", typing.get_args(facts.Role)),
        ("States of a node", "state", typing.get_args(node)),
        ("Modes of a job", "mode", typing.get_args(mode)),
        ("Outcomes of an incident", "outcome", typing.get_args(outcome)),
        ("Ends of a job", "state", typing.get_args(views.JobState)),
    ):
        found = list(settings(attribute, functions))
        if attribute == "outcome":  # handed on through a dictionary
            found = [(value, one.name) for one in closing for value in constants(one.tree)]
        first = {"role": "", "state": "at first", "mode": "at first", "outcome": "until closed"}
        rows = []
        for value in values:
            setters = dict.fromkeys(name for one, name in found if one == value)
            rows.append((value, ", ".join(f"`{n}`" for n in setters) or first[attribute]))
        if title.startswith("Ends"):
            rows = [(value, setters) for value, setters in rows if setters.startswith("`")]
        yield f"### {title}\n"
        yield table([title.split()[0].lower().removesuffix("s"), "set by"], rows)


# ------------------------------------------------------------------ agent


def agent_section() -> Iterator[str]:
    methods = {one.tree.name: one.tree for one in functions_of(machine)}
    yield "## An agent\n"
    yield (
        "The agent's machine takes inputs and returns effects; its shell carries them out in that "
        "order. `SayUp`\nis everything that the agent tells the orchestrator. It is queued while "
        "the stream is away, unless the\nnext look shows it anyway.\n"
    )
    given = dict(_cases(methods["handle"], methods))
    heard = dict(_cases(methods["_command"], methods))
    rows = [
        (f"`{one.__name__}`", words(one), given.get(one.__name__, ""))
        for one in typing.get_args(machine.Given)
    ]
    yield table(["input", "meaning", "effects that may follow"], rows)
    heeded = [one for one in typing.get_args(agent_messages.AgentCommand) if one.__name__ in heard]
    yield "What a command (`Heard`) can lead to:\n"
    yield table(
        ["command", "effects"], [(f"`{one.__name__}`", heard[one.__name__]) for one in heeded]
    )
    effects = typing.get_args(machine.AnyEffect)
    yield table(["effect", "meaning"], [(f"`{one.__name__}`", words(one)) for one in effects])


def _cases(tree: ast.FunctionDef, methods: dict[str, ast.FunctionDef]) -> Iterator[tuple[str, str]]:
    match = next(node for node in ast.walk(tree) if isinstance(node, ast.Match))
    for case in match.cases:
        if isinstance(case.pattern, ast.MatchClass):
            found = _effects(case.body, methods, set())
            name = ast.unparse(case.pattern.cls)
            yield name, ", ".join(f"`{one}`" for one in dict.fromkeys(found)) or "none"


def _effects(
    body: Sequence[ast.stmt], methods: dict[str, ast.FunctionDef], seen: set[str]
) -> Iterator[str]:
    kinds = {one.__name__ for one in typing.get_args(machine.AnyEffect)}
    for call in (call for one in body for call in called(one)):
        name = name_of(call)
        if name in kinds:
            yield name
        elif ast.unparse(call.func) == f"self.{name}" and name in methods and name not in seen:
            seen.add(name)
            yield from _effects(methods[name].body, methods, seen)


# ------------------------------------------------------------------ messages and records


def struct_rows(union: Any, functions: Sequence[Function] = ()) -> Iterator[list[str]]:
    for one in typing.get_args(union):
        fields = [f"`{name}`" for name in one.__struct_fields__ if name not in ("job", "at_ns")]
        row = [f"`{one.__name__}`", words(one), ", ".join(fields)]
        made = ", ".join(makers(functions, one)) if functions else ""
        yield [*row, made or "the shell"] if functions else row


def message_section() -> Iterator[str]:
    functions = core_functions()
    yield "## Messages\n"
    for title, union, sent in (
        ("Worker to orchestrator", messages.WorkerMessage, ()),
        ("Orchestrator to worker", commands.WorkerCommand, functions),
        ("Agent to orchestrator", agent_messages.AgentMessage, ()),
        ("Orchestrator to agent", agent_messages.AgentCommand, functions),
        ("Worker to an agent that keeps side state", blob_messages.BlobRequest, ()),
        ("The answers to it", blob_messages.BlobReply, ()),
        ("Worker to an agent that keeps its state", vault.VaultRequest, ()),
        ("The answers to it", vault.VaultReply, ()),
    ):
        yield f"### {title}\n"
        head = ["message", "meaning", "fields", *(["decided in"] if sent else [])]
        yield table(head, struct_rows(union, sent))
    yield "## Inputs of the core\n"
    yield table(["input", "meaning", "fields"], struct_rows(inputs.CoreInput))
    yield "## Records\n"
    yield "Each is durable before anything follows from it. Every record has `job` and `at_ns`.\n"
    yield table(
        ["record", "meaning", "fields", "written by"], struct_rows(records.Record, functions)
    )


def page() -> str:
    sections = (
        phase_section,
        row_section,
        timer_section,
        state_section,
        agent_section,
        message_section,
    )
    return "\n".join([HEAD, *(text for section in sections for text in section())])


if __name__ == "__main__":
    PAGE.write_text(page())
