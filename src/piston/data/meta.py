"""Tables of meta/ that come in several forms: task texts by number, and lines of JSON; damaged lines are reported."""

import codecs
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from piston.data.problems import Problem, file_fault
from piston.data.tables import TableFault, read_table

_TASKS = "meta/tasks.parquet"


def read_tasks(root: Path, version: str, problems: list[Problem]) -> dict[int, str]:
    """Task texts by number, from tasks.parquet (text in a column or the pandas index, of any name) or tasks.jsonl."""
    names = ("tasks.parquet", "tasks.jsonl") if version == "v3.0" else ("tasks.jsonl", "tasks.parquet")
    found = next((root / "meta" / name for name in names if (root / "meta" / name).exists()), None)
    if found is None:
        fix = "restore the file; without texts, turn data.prompt_from_task off and give data.default_prompt"
        what, file = "table of tasks is missing", f"meta/{names[0]}"
        problems.append(Problem("error", "missing-tasks", what, "no such file", "task texts", fix, file=file))
        return {}
    if found.suffix == ".jsonl":
        return {
            int(line["task_index"]): str(line["task"]) for line in json_lines(found, ("task_index", "task"), problems)
        }
    try:
        table, _, _ = read_table(found, lambda _: True)
    except TableFault as error:
        problems.append(error.fault.problem(file=f"meta/{found.name}"))
        return {}
    return _task_texts(table, problems)


def _task_texts(table: pa.Table, problems: list[Problem]) -> dict[int, str]:
    kinds = {field.name: field.type for field in table.schema}
    texts = [name for name, kind in kinds.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)]
    numbers = [name for name, kind in kinds.items() if pa.types.is_integer(kind)]
    if not texts:
        what, fix = "table of tasks has no texts", "write it again with the text as index or as column `task`"
        expected = "a column of texts"
        problems.append(Problem("error", "missing-tasks", what, f"columns {sorted(kinds)}", expected, fix, file=_TASKS))
        return {}
    text = "task" if "task" in texts else texts[0]
    number = "task_index" if "task_index" in numbers else (numbers or [None])[0]
    index = range(table.num_rows) if number is None else table.column(number).to_pylist()
    return {int(n): str(task) for n, task in zip(index, table.column(text).to_pylist(), strict=True) if n is not None}


def json_lines(path: Path, keys: tuple[str, ...], problems: list[Problem]) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; a line that is none, or lacks a key, becomes a problem."""
    name = f"meta/{path.name}"
    fault = file_fault(path, "metadata")
    if fault is not None:
        problems.append(fault.problem(file=name))
        return []
    objects = []
    for n, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            value = None
        if isinstance(value, dict) and all(value.get(key) is not None for key in keys):
            objects.append(value)
            continue
        what, fix = "line is cut short or damaged", "restore the file; the recorder may have been stopped"
        expected = f"a JSON object with {', '.join(keys)}"
        problems.append(
            Problem(
                "error", "bad-json", what, f"line {n}: {line[:60].decode(errors='replace')!r}", expected, fix, file=name
            )
        )
    return objects
