"""The ledger on disk: SQLite (WAL), one writer. What it says after kill -9 is what resume goes on from.

Tables: `attempts` (one row per prompt attempt, the columns of flow.ledger.Row) and `rollouts` (every graded rollout
with its exact ids, log-probs, spans, conversation, reward or traceback). People may open it with any SQLite client.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import DataError, boundary
from headrace.flow.ledger import Row
from headrace.records import Completion, Message, Outcome, Rollout, Span, Turn

_ROW_FIELDS = tuple(f.name for f in dataclasses.fields(Row))
_TUPLES = frozenset(f.name for f in dataclasses.fields(Row) if str(f.type).startswith("tuple"))


def rollout_to_json(rollout: Rollout) -> str:
    """All of a rollout as JSON; float32 log-probs survive exactly."""

    def encode(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        raise TypeError(f"cannot store {type(value).__name__} in the ledger")

    return json.dumps(dataclasses.asdict(rollout), default=encode, separators=(",", ":"))


def rollout_from_json(text: str) -> Rollout:
    """Inverse of `rollout_to_json`; DataError when the text is not one of ours."""
    with boundary(DataError, "reading a rollout from the ledger"):
        data = json.loads(text)
        turns = tuple(
            Turn(
                prompt_ids=tuple(turn["prompt_ids"]),
                completion=_completion(turn["completion"]),
                env_version=turn["env_version"],
            )
            for turn in data.pop("turns")
        )
        messages = tuple(Message(**m) for m in data.pop("messages"))
        outcome = Outcome(data.pop("outcome"))
        return Rollout(turns=turns, messages=messages, outcome=outcome, **data)


def _completion(data: dict[str, Any]) -> Completion:
    ids_N = np.asarray(data.pop("ids_N"), dtype=np.int32)
    logp_N = np.asarray(data.pop("logp_N"), dtype=np.float32)
    spans = tuple(Span(**s) for s in data.pop("spans"))
    return Completion(ids_N=ids_N, logp_N=logp_N, spans=spans, **data)


class Journal:
    """Opens or creates `path`. Each `write` is one transaction: a step of the controller is on disk whole or not."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        columns = ", ".join(f"{name}{' PRIMARY KEY' if name == 'group_id' else ''}" for name in _ROW_FIELDS)
        self._db.execute(f"CREATE TABLE IF NOT EXISTS attempts ({columns}) WITHOUT ROWID")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS rollouts (group_id TEXT, member INT, attempt INT, outcome TEXT, reward REAL, "
            "generated_tok INT, data TEXT, PRIMARY KEY (group_id, member, attempt)) WITHOUT ROWID"
        )
        marks = ", ".join("?" for _ in _ROW_FIELDS)
        self._upsert = f"INSERT OR REPLACE INTO attempts ({', '.join(_ROW_FIELDS)}) VALUES ({marks})"

    def write(self, rows: Iterable[Row], rollouts: Iterable[Rollout] = ()) -> None:
        """Store changed attempts and finished rollouts together."""
        with boundary(DataError, "writing the ledger"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(self._upsert, (self._encode(row) for row in rows))
                self._db.executemany(
                    "INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        (r.group_id, r.member, r.attempt, str(r.outcome), r.reward, r.generated_tok, rollout_to_json(r))
                        for r in rollouts
                    ),
                )
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def rows(self) -> list[Row]:
        """All attempts in order of admission."""
        order = "ORDER BY ordinal, attempt"
        found = self._db.execute(f"SELECT {', '.join(_ROW_FIELDS)} FROM attempts {order}")
        return [self._decode(values) for values in found]

    def rollouts(self, group_id: str) -> list[Rollout]:
        """The newest attempt of each member of a group, by member."""
        found = self._db.execute(
            "SELECT data FROM rollouts WHERE group_id = ? ORDER BY member, attempt", (group_id,)
        ).fetchall()
        newest = {r.member: r for r in (rollout_from_json(data) for (data,) in found)}
        return [newest[m] for m in sorted(newest)]

    def close(self) -> None:
        self._db.close()

    @staticmethod
    def _encode(row: Row) -> list[Any]:
        values = (getattr(row, name) for name in _ROW_FIELDS)
        return [json.dumps(v) if isinstance(v, tuple | list | dict) else v for v in values]

    @staticmethod
    def _decode(values: tuple[Any, ...]) -> Row:
        data = dict(zip(_ROW_FIELDS, values, strict=True))
        for name in _TUPLES:
            data[name] = _tuples(json.loads(data[name]))
        return Row(**data)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
