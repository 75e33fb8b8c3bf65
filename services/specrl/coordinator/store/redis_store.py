"""Store in Redis: for clusters. A write is one Lua script, so it happens whole or not at all.

    PREFIX:meta               schema, run, token and owner of the claim, sequence, trained
    PREFIX:facts              name -> JSON
    PREFIX:steps              steps that have rollouts
    PREFIX:rollouts:STEP      index:sample -> attempt (4 bytes), protobuf GradedRollout
    PREFIX:batches            step -> protobuf Batch without rollouts
    PREFIX:prompts            step of a batch -> "STEP:index " of each prompt whose rollouts are part of it
    PREFIX:reports            step -> JSON, of the newest steps

Memory is bounded by what the schedule allows in flight, the batches between two checkpoints and `REPORTS_KEPT`.

Writes are numbered. The server applies number n only after n - 1, and only under the newest claim. So a write that is
repeated because its answer was lost is harmless; one that a slow server executes long after its connection was given
up is refused; and a server that comes back with a lower number than it acknowledged has lost writes, which is found
out at the next connection, before anything is read or written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import redis

from specrl.coordinator.store.contract import REPORTS_KEPT, SCHEMA_VERSION, Claim, StoredRollout, as_written
from specrl.coordinator.store.redis_server import RedisServer
from specrl.errors import StoreFailed, StoreInvalid
from specrl.spec.store import RedisStore as Settings

LARGEST_BYTES = 512 * 1024 * 1024 - 1024
"""Redis' own limit of one value (proto-max-bulk-len), less the attempt."""

BATCHES_WHOLE = 2
"""The schema version before this one. It lacks PREFIX:prompts, and becomes this one when it is claimed."""

SCAN_COUNT = 64
"""Rollouts in one reply: a rollout of 8k tokens is 100 kB, and a reply should not stall the server."""

Argument = str | bytes | int

_CLAIM = """
local held = redis.call('HMGET', KEYS[1], 'schema', 'run', 'token')
if held[1] and held[1] ~= ARGV[1] and held[1] ~= ARGV[5] then return {'schema', held[1]} end
if held[2] and held[2] ~= ARGV[2] then return {'run', held[2]} end
if not held[1] and redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[7]) > 0 then return {'foreign', ''} end
if held[3] ~= ARGV[3] then
  redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'run', ARGV[2], 'token', ARGV[3], 'owner', ARGV[4])
  redis.call('HSETNX', KEYS[1], 'sequence', 0)
end
return {'done', redis.call('HGET', KEYS[1], 'sequence')}
"""

# What a full server would refuse comes after what it allows: once a script has written, Redis lets it finish. SREM of
# nothing is such a write.
_WRITE = """
local held = redis.call('HMGET', KEYS[1], 'token', 'sequence', 'trained')
if held[1] ~= ARGV[1] then return {'claimed', '-1'} end
if tonumber(ARGV[2]) ~= tonumber(held[2]) + 1 then return {'number', held[2]} end
local operation, outcome = ARGV[3], 'done'
local function named_by(batch, found)
  for own, index in string.gmatch(redis.call('HGET', KEYS[7], batch) or '', '(%d+):(%d+) ') do
    found[own] = found[own] or {}
    found[own][index] = true
  end
end
local function forget(own, prompts, are_kept)
  local key, gone, left = KEYS[6] .. ':' .. own, {}, 0
  for _, name in ipairs(redis.call('HKEYS', key)) do
    local is_named = prompts[string.match(name, '^[^:]+')] or false
    if is_named == are_kept then left = left + 1 else table.insert(gone, name) end
  end
  if left == 0 then
    redis.call('UNLINK', key)
    redis.call('SREM', KEYS[5], own)
  else
    for _, name in ipairs(gone) do redis.call('HDEL', key, name) end
  end
end
if operation == 'fact' then
  redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
elseif operation == 'rollouts' then
  for i = 4, #ARGV, 3 do
    redis.call('HSET', KEYS[6] .. ':' .. ARGV[i], ARGV[i + 1], ARGV[i + 2])
    redis.call('SADD', KEYS[5], ARGV[i])
  end
elseif operation == 'batch' then
  if redis.call('HSETNX', KEYS[3], ARGV[4], ARGV[5]) == 1 then
    outcome = 'first'
    if ARGV[6] ~= '' then redis.call('HSET', KEYS[7], ARGV[4], ARGV[6]) end
  end
elseif operation == 'finish' then
  local step, kept = tonumber(ARGV[4]), {}
  redis.call('SREM', KEYS[5], '')
  for i = 7, #ARGV, 2 do
    kept[ARGV[i]] = kept[ARGV[i]] or {}
    kept[ARGV[i]][ARGV[i + 1]] = true
  end
  for _, batch in ipairs(redis.call('HKEYS', KEYS[7])) do named_by(batch, kept) end
  for _, other in ipairs(redis.call('SMEMBERS', KEYS[5])) do
    if tonumber(other) <= step then forget(other, kept[other] or {}, true) end
  end
  for _, other in ipairs(redis.call('HKEYS', KEYS[4])) do
    if tonumber(other) <= step - tonumber(ARGV[6]) then redis.call('HDEL', KEYS[4], other) end
  end
  redis.call('HSET', KEYS[4], ARGV[4], ARGV[5])
  if step > tonumber(held[3] or '0') then redis.call('HSET', KEYS[1], 'trained', ARGV[4]) end
elseif operation == 'report' then
  if redis.call('HEXISTS', KEYS[4], ARGV[4]) == 1 then redis.call('HSET', KEYS[4], ARGV[4], ARGV[5]) end
elseif operation == 'forget' then
  local trained = {}
  redis.call('SREM', KEYS[5], '')
  for _, step in ipairs(redis.call('HKEYS', KEYS[3])) do
    if tonumber(step) <= tonumber(ARGV[4]) then
      if tonumber(step) <= tonumber(held[3] or '0') then named_by(step, trained) end
      redis.call('HDEL', KEYS[3], step)
      redis.call('HDEL', KEYS[7], step)
    end
  end
  for own, prompts in pairs(trained) do forget(own, prompts, false) end
elseif operation == 'reset' then
  for _, step in ipairs(redis.call('SMEMBERS', KEYS[5])) do redis.call('UNLINK', KEYS[6] .. ':' .. step) end
  redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[7])
  return {'done', ARGV[2]}
else
  return redis.error_reply('ERR no such operation: ' .. operation)
end
redis.call('HSET', KEYS[1], 'sequence', ARGV[2])
return {outcome, ARGV[2]}
"""


class RedisStore:
    """All keys of one run, under one prefix."""

    def __init__(self, settings: Settings, prefix: str, claim: Claim | None) -> None:
        """Connect, and claim the keys; without a claim they can be read only."""
        self._settings, self._prefix, self._claim = settings, prefix, claim
        names = ("meta", "facts", "batches", "reports", "steps", "rollouts", "prompts")
        self._keys = [f"{prefix}:{name}" for name in names]
        self._meta, self._facts, self._batches, self._reports, self._steps, self._rollouts, self._prompts = self._keys
        self._acknowledged = -1
        self._server = RedisServer(settings, self._why_not)
        try:
            if claim is None:
                self._check_readable()
            else:
                self._acknowledged = self._claimed(claim)
        except BaseException:
            self._server.drop()
            raise

    def fact(self, name: str) -> Any | None:
        def read(client: redis.Redis) -> Any | None:
            value = client.execute_command("HGET", self._facts, name)
            return json.loads(value) if value is not None else None

        return self._read(read)

    def facts(self) -> dict[str, Any]:
        def read(client: redis.Redis) -> dict[str, Any]:
            found = client.execute_command("HGETALL", self._facts)
            return {name.decode(): json.loads(found[name]) for name in sorted(found)}

        return self._read(read)

    def set_fact(self, name: str, value: Any) -> None:
        self._write("fact", name, json.dumps(value))

    def put_rollouts(self, rollouts: Sequence[StoredRollout]) -> None:
        arguments: list[Argument] = []
        for row in rollouts:
            _check_size(len(row.data), f"a rollout of step {row.step}")
            value = row.attempt.to_bytes(4, "big") + row.data
            arguments += [row.step, f"{row.index}:{row.sample}", value]
        self._write("rollouts", *arguments)

    def rollouts(self) -> list[StoredRollout]:
        return sorted(self._read(self._scan), key=lambda row: (row.step, row.index, row.sample))

    def _scan(self, client: redis.Redis) -> list[StoredRollout]:
        found: dict[tuple[int, ...], StoredRollout] = {}
        trained = self._trained_prompts(client)
        for step in map(int, client.execute_command("SMEMBERS", self._steps)):
            cursor = 0
            while True:
                cursor, fields = client.execute_command(
                    "HSCAN", f"{self._rollouts}:{step}", cursor, "COUNT", SCAN_COUNT
                )
                for name, value in fields.items():
                    index, sample = map(int, name.split(b":"))
                    if (step, index) not in trained:
                        attempt = int.from_bytes(value[:4], "big")
                        found[step, index, sample] = StoredRollout(step, index, sample, attempt, value[4:])
                if not int(cursor):
                    break
        return list(found.values())

    def _trained_prompts(self, client: redis.Redis) -> set[tuple[int, int]]:
        """(step, index) of prompts whose rollouts a trained step's batch names."""
        trained = int(client.execute_command("HGET", self._meta, "trained") or 0)
        listed = client.execute_command("HGETALL", self._prompts)
        return {prompt for step, text in listed.items() if int(step) <= trained for prompt in _prompts(text)}

    def rollout_counts(self) -> dict[int, int]:
        return self._read(self._count)

    def _count(self, client: redis.Redis) -> dict[int, int]:
        steps = sorted(map(int, client.execute_command("SMEMBERS", self._steps)))
        trained = self._trained_prompts(client)
        counts: dict[int, int] = {}
        for step in steps:
            names = client.execute_command("HKEYS", f"{self._rollouts}:{step}")
            counts[step] = sum((step, int(name.split(b":")[0])) not in trained for name in names)
        return {step: count for step, count in counts.items() if count}

    def put_batch(self, step: int, data: bytes, prompts: Sequence[tuple[int, int]] = ()) -> bool:
        _check_size(len(data), f"the batch of step {step}")
        named = "".join(f"{own_step}:{index} " for own_step, index in prompts)
        return self._write("batch", step, data, named) == "first"

    def batch(self, step: int) -> bytes | None:
        found: bytes | None = self._read(lambda client: client.execute_command("HGET", self._batches, step))
        return found

    def batch_rollouts(self, step: int) -> list[bytes]:
        return self._read(lambda client: self._named(client, step))

    def _named(self, client: redis.Redis, step: int) -> list[bytes]:
        """One prompt after the other, so that no reply is longer than the rollouts of one."""
        prompts = _prompts(client.execute_command("HGET", self._prompts, step) or b"")
        names: dict[tuple[int, int], list[bytes]] = {prompt: [] for prompt in prompts}
        for own_step in {own_step for own_step, _ in prompts}:
            for name in client.execute_command("HKEYS", f"{self._rollouts}:{own_step}"):
                names.get((own_step, int(name.split(b":")[0])), []).append(name)
        found: list[bytes] = []
        for prompt in prompts:
            samples = sorted(names[prompt], key=lambda name: int(name.split(b":")[1]))
            if samples:
                values = client.execute_command("HMGET", f"{self._rollouts}:{prompt[0]}", *samples)
                found += [value[4:] for value in values if value is not None]  # none: forgotten since it was listed
        return found

    def batches(self) -> list[int]:
        return self._read(lambda client: sorted(map(int, client.execute_command("HKEYS", self._batches))))

    def finish_step(self, step: int, report: dict[str, Any], kept: Sequence[tuple[int, int]] = ()) -> None:
        marks = [number for prompt in kept for number in prompt]
        self._write("finish", step, json.dumps(report), REPORTS_KEPT, *marks)

    def set_report(self, step: int, report: dict[str, Any]) -> None:
        self._write("report", step, json.dumps(report))

    def trained(self) -> int:
        return self._read(lambda client: int(client.execute_command("HGET", self._meta, "trained") or 0))

    def reports(self, after: int = 0) -> list[dict[str, Any]]:
        def read(client: redis.Redis) -> list[dict[str, Any]]:
            found = client.execute_command("HGETALL", self._reports)
            steps = sorted((int(step), report) for step, report in found.items())
            return [json.loads(report) for step, report in steps if step > after]

        return self._read(read)

    def forget_batches(self, up_to: int) -> None:
        self._write("forget", up_to)

    def reset(self) -> None:
        self._write("reset")

    def describe(self) -> dict[str, Any]:
        def read(client: redis.Redis) -> dict[str, Any]:
            meta = client.execute_command("HGETALL", self._meta)
            found = {name.decode(): value.decode() for name, value in meta.items()}
            return {
                "kind": "redis",
                "place": self._place,
                "schemaVersion": int(found.get("schema", SCHEMA_VERSION)),
                "claimedBy": found.get("owner"),
                "writes": int(found.get("sequence", 0)),
            }

        return self._read(read)

    def close(self) -> None:
        self._server.drop()

    # -- the claim and the numbers -------------------------------------------------------------------------------

    def _claimed(self, claim: Claim) -> int:
        """Make the claim; returns the number of the last write."""
        arguments = (SCHEMA_VERSION, claim.run_id, claim.token, claim.owner, BATCHES_WHOLE)
        outcome, said = self._server.call(lambda client: self._run(client, _CLAIM, arguments))
        if outcome == "schema":
            self._refuse_schema(said)
        if outcome == "run":
            raise StoreInvalid(
                f"store.redis.keyPrefix must be this run's own, got {self._prefix}:*, which holds another run's state "
                f"(id {said}); choose another keyPrefix, or reset the store of that run. A run whose folder was lost "
                "goes on when that id is written to the file store-id of its new folder"
            )
        if outcome == "foreign":
            raise StoreInvalid(
                f"store.redis.keyPrefix must hold nothing but specrl's keys, got others under {self._prefix}:*; choose "
                "another keyPrefix"
            )
        return int(said)

    def _check_readable(self) -> None:
        schema = self._server.call(lambda client: client.execute_command("HGET", self._meta, "schema"))
        if schema is None:
            raise StoreInvalid(f"the store must have been written to, got nothing under {self._prefix}:*; run it first")
        if int(schema) not in (BATCHES_WHOLE, SCHEMA_VERSION):
            self._refuse_schema(schema.decode())

    def _refuse_schema(self, found: str) -> None:
        raise StoreInvalid(
            f"the store must be of schema version {SCHEMA_VERSION}, got {found} under {self._prefix}:*; another "
            "version of specrl wrote it: use that one, or start a new run"
        )

    def _why_not(self, client: redis.Redis) -> str:
        """Why this primary must not be used after what others, or it, have acknowledged; nothing if it may be."""
        if self._claim is None or self._acknowledged < 0:
            return ""
        token, sequence, owner = client.execute_command("HMGET", self._meta, "token", "sequence", "owner")
        if sequence is None:
            return "holds nothing of the run: it was reset, or lost its data; restore them, or resume from nothing"
        if int(sequence) < self._acknowledged:
            return (
                f"has lost acknowledged writes: its last is number {int(sequence)}, {self._acknowledged} was "
                "acknowledged; restore its newest data, or go on from what it holds by resuming the run"
            )
        if token is None or token.decode() != self._claim.token:
            return (
                f"was claimed by {owner.decode() if owner else 'nobody'}: a newer coordinator has taken the run over, "
                "and nothing of this one was written since"
            )
        return ""

    def _write(self, operation: str, *arguments: Argument) -> str:
        """Do one operation. If it was done before and the answer was lost, doing it again changes nothing.

        Returns `first` where it has made what did not exist, and is known to have; otherwise `done`.
        """
        if self._claim is None:
            raise StoreInvalid("the store must be claimed to be written, got a reader; open it with a claim")
        token = self._claim.token

        def once(client: redis.Redis) -> tuple[str, int]:
            outcome, last = self._run(client, _WRITE, (token, self._acknowledged + 1, operation, *arguments))
            return outcome, int(last)

        outcome, last = self._server.call(once)
        if outcome == "number" and last > self._acknowledged:
            # A write before this one was applied, and its answer was lost.
            self._acknowledged = last
            outcome, last = self._server.call(once)
        if outcome not in ("done", "first"):
            self._server.drop()  # the next call judges the server, and whether it is one still
            raise StoreFailed("the store must take the next write, got another claim or number; it is asked again")
        self._acknowledged = last
        return outcome

    def _run(self, client: redis.Redis, script: str, arguments: Sequence[Argument]) -> tuple[str, str]:
        """Run a script, and wait for the replicas that must have it. Returns its outcome and what it says."""
        call = ("EVAL", script, len(self._keys), *self._keys, *arguments)
        wanted = self._settings.replica_acks
        if wanted:
            # On the same connection: WAIT is about the writes of its own. Its patience is shorter than the socket's.
            with client.pipeline(transaction=False) as pipeline:
                pipeline.execute_command(*call)
                pipeline.execute_command("WAIT", wanted, self._settings.timeout_s * 800)
                reply, confirmed = pipeline.execute()
            if confirmed < wanted:
                raise StoreFailed(
                    f"every write must reach {wanted} replicas of the store, got {confirmed} in "
                    f"{self._settings.timeout_s * 0.8:g} s; nothing advances until they are back"
                )
        else:
            reply = client.execute_command(*call)
        outcome, said = reply
        return outcome.decode(), said.decode() if isinstance(said, bytes) else str(said)

    @property
    def _place(self) -> str:
        return f"{self._server.place} {self._prefix}:*"

    def _read[T](self, work: Callable[[redis.Redis], T]) -> T:
        """Read, and make sure afterwards that it was read from a server that has everything."""

        def checked(client: redis.Redis) -> T:
            with as_written(self._place):
                found = work(client)
                reason = self._why_not(client)
            if reason:
                raise StoreFailed(f"the store must have every write, got a server that {reason}")
            return found

        return self._server.call(checked)


def _prompts(text: bytes) -> list[tuple[int, int]]:
    """(step, index) of each prompt that a batch names."""
    return [(int(own_step), int(index)) for own_step, index in (name.split(b":") for name in text.split())]


def _check_size(size_bytes: int, what: str) -> None:
    if size_bytes > LARGEST_BYTES:
        raise StoreInvalid(
            f"{what} must be <= {LARGEST_BYTES} bytes for Redis, got {size_bytes}; lower promptsPerStep or groupSize, "
            "or use store.sqlite"
        )
