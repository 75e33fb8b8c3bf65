"""The store of runs in a cluster: Redis. Each write is one Lua script, so it is applied wholly or not at all.

    PREFIX:meta               schema, run, token and owner of the claim, sequence, trained
    PREFIX:facts              name -> JSON
    PREFIX:steps              steps that have rollouts
    PREFIX:rollouts:STEP      index:sample -> attempt (4 bytes), protobuf GradedRollout
    PREFIX:batches            step -> protobuf Batch without rollouts
    PREFIX:indexes            step of a batch -> "index " of each prompt whose rollouts are part of it
    PREFIX:reports            step -> JSON, of the newest steps

Memory is bounded by the rollouts that the schedule allows in flight, the batches between two checkpoints and
`REPORTS_KEPT`.

Writes are numbered (docs/decisions/0007). The server applies write n only after write n - 1, and only under the newest
claim. Three things follow:

- Repeating a write whose answer was lost is harmless.
- A write that a slow server executes after the coordinator has moved on is refused.
- A server that returns with a smaller number than it acknowledged has lost writes. The next connection detects that
  before anything is read or written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from specrl.coordinator.ledger.contract import (
    REPORTS_KEPT,
    SCHEMA_VERSION,
    Claim,
    StoredRollout,
    translate_decode_errors,
)
from specrl.coordinator.ledger.redis_server import RedisServer
from specrl.errors import StoreFailed, StoreInvalid
from specrl.spec.store import RedisStore as Settings

LARGEST_BYTES = 512 * 1024 * 1024 - 1024
"""Redis' default limit of one value (proto-max-bulk-len), less room for the attempt that precedes a rollout."""

REPLY_ROWS = 64
REPLY_BYTES = 8 * 1024 * 1024
"""Most rollouts, and most bytes of them, in a reply, so that none stalls the server. A rollout of 8k tokens is 100 kB;
with recorded experts it may have several MB. One that is larger than the limit has a reply of its own."""

Argument = str | bytes | int

_CLAIM = """
local held = redis.call('HMGET', KEYS[1], 'schema', 'run', 'token')
if held[1] and held[1] ~= ARGV[1] then return {'schema', held[1]} end
if held[2] and held[2] ~= ARGV[2] then return {'run', held[2]} end
if not held[1] and redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[7]) > 0 then return {'foreign', ''} end
if held[3] ~= ARGV[3] then
  redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'run', ARGV[2], 'token', ARGV[3], 'owner', ARGV[4])
  redis.call('HSETNX', KEYS[1], 'sequence', 0)
end
return {'done', redis.call('HGET', KEYS[1], 'sequence')}
"""

# Reads fields of a hash, in order, until the reply is full: nil for a field that does not exist.
_READ = """
local values, size = {}, 0
for place = 2, #ARGV do
  local value = redis.call('HGET', KEYS[1], ARGV[place])
  size = size + (value and #value or 0)
  -- The next call reads this value again. HSTRLEN would give the size alone, but the ACL in docs/store.md forbids it.
  if place > 2 and size > tonumber(ARGV[1]) then break end
  values[place - 1] = value
end
return values
"""

# A server that has reached maxmemory refuses a script's first command that may need memory. Once a script has written,
# Redis lets it finish. So `finish` and `forget`, which free memory, start with a write that is always allowed: SREM of
# a member that does not exist.
_WRITE = """
local held = redis.call('HMGET', KEYS[1], 'token', 'sequence', 'trained')
if held[1] ~= ARGV[1] then return {'claimed', '-1'} end
if tonumber(ARGV[2]) ~= tonumber(held[2]) + 1 then return {'number', held[2]} end
local operation, outcome = ARGV[3], 'done'
local function forget(step, kept)
  local key, gone, left = KEYS[6] .. ':' .. step, {}, 0
  for _, name in ipairs(redis.call('HKEYS', key)) do
    if kept[string.match(name, '^[^:]+')] then left = left + 1 else table.insert(gone, name) end
  end
  if left == 0 then
    redis.call('UNLINK', key)
    redis.call('SREM', KEYS[5], step)
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
  local step = tonumber(ARGV[4])
  redis.call('SREM', KEYS[5], '')
  for _, other in ipairs(redis.call('SMEMBERS', KEYS[5])) do
    if tonumber(other) <= step then
      local kept = {}
      for index in string.gmatch(redis.call('HGET', KEYS[7], other) or '', '%d+') do kept[index] = true end
      forget(other, kept)
    end
  end
  for _, other in ipairs(redis.call('HKEYS', KEYS[4])) do
    if tonumber(other) <= step - tonumber(ARGV[6]) then redis.call('HDEL', KEYS[4], other) end
  end
  redis.call('HSET', KEYS[4], ARGV[4], ARGV[5])
  if step > tonumber(held[3] or '0') then redis.call('HSET', KEYS[1], 'trained', ARGV[4]) end
elseif operation == 'report' then
  if redis.call('HEXISTS', KEYS[4], ARGV[4]) == 1 then redis.call('HSET', KEYS[4], ARGV[4], ARGV[5]) end
elseif operation == 'forget' then
  redis.call('SREM', KEYS[5], '')
  for _, step in ipairs(redis.call('HKEYS', KEYS[3])) do
    if tonumber(step) <= tonumber(ARGV[4]) then
      if tonumber(step) <= tonumber(held[3] or '0') then forget(step, {}) end
      redis.call('HDEL', KEYS[3], step)
      redis.call('HDEL', KEYS[7], step)
    end
  end
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
    """The store of one run: all keys under one prefix."""

    def __init__(self, settings: Settings, prefix: str, claim: Claim | None) -> None:
        """Connect and claim the keys. Without a claim the store is read-only."""
        self._settings = settings
        self._prefix = prefix
        self._claim = claim
        names = ("meta", "facts", "batches", "reports", "steps", "rollouts", "indexes")
        self._keys = [f"{prefix}:{name}" for name in names]
        self._meta, self._facts, self._batches, self._reports, self._steps, self._rollouts, self._indexes = self._keys
        self._acknowledged = -1  # number of the last acknowledged write; -1 before the claim
        self._server = RedisServer(settings, self._explain_refusal)
        try:
            if claim is None:
                self._check_readable()
            else:
                self._acknowledged = self._claim_keys(claim)
        except BaseException:
            self._server.disconnect()
            raise

    def read_facts(self) -> dict[str, Any]:
        def decode_facts(client: redis.Redis) -> dict[str, Any]:
            found = client.execute_command("HGETALL", self._facts)
            return {name.decode(): json.loads(found[name]) for name in sorted(found)}

        return self._read_checked(decode_facts)

    def set_fact(self, name: str, value: Any) -> None:
        self._apply_operation("fact", name, json.dumps(value))

    def put_rollouts(self, rollouts: Sequence[StoredRollout]) -> None:
        arguments: list[Argument] = []
        for row in rollouts:
            _check_size(len(row.data), f"a rollout of step {row.step}")
            value = row.attempt.to_bytes(4, "big") + row.data
            arguments += [row.step, f"{row.index}:{row.sample}", value]
        self._apply_operation("rollouts", *arguments)

    def read_rollouts(self) -> list[StoredRollout]:
        return sorted(self._read_checked(self._scan_rollouts), key=lambda row: (row.step, row.index, row.sample))

    def _scan_rollouts(self, client: redis.Redis) -> list[StoredRollout]:
        found: list[StoredRollout] = []
        for step in self._untrained_steps(client):
            names = client.execute_command("HKEYS", f"{self._rollouts}:{step}")
            for name, value in self._read_values(client, step, names):
                index, sample = map(int, name.split(b":"))
                attempt = int.from_bytes(value[:4], "big")
                found.append(StoredRollout(step, index, sample, attempt, value[4:]))
        return found

    def _read_values(self, client: redis.Redis, step: int, names: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield name and value of rollouts of a step, in order. One that was deleted since it was listed is left out.

        Each reply has at most REPLY_ROWS rollouts and REPLY_BYTES, but at least one rollout.
        """
        first = 0
        while first < len(names):
            asked = names[first : first + REPLY_ROWS]
            values = client.execute_command("EVAL", _READ, 1, f"{self._rollouts}:{step}", REPLY_BYTES, *asked)
            for name, value in zip(asked, values, strict=False):
                if value is not None:
                    yield name, value
            first += len(values)

    def _untrained_steps(self, client: redis.Redis) -> list[int]:
        """Return the untrained steps that have rollouts, ascending; those below 1 initialise the drafter."""
        trained = int(client.execute_command("HGET", self._meta, "trained") or 0)
        steps = map(int, client.execute_command("SMEMBERS", self._steps))
        return sorted(step for step in steps if step < 1 or step > trained)

    def count_rollouts(self) -> dict[int, int]:
        return self._read_checked(self._count_rollouts)

    def _count_rollouts(self, client: redis.Redis) -> dict[int, int]:
        steps = self._untrained_steps(client)
        return {step: client.execute_command("HLEN", f"{self._rollouts}:{step}") for step in steps}

    def put_batch(self, step: int, data: bytes, indexes: Sequence[int] = ()) -> bool:
        _check_size(len(data), f"the batch of step {step}")
        return self._apply_operation("batch", step, data, "".join(f"{index} " for index in indexes)) == "first"

    def read_batch(self, step: int) -> bytes | None:
        found: bytes | None = self._read_checked(lambda client: client.execute_command("HGET", self._batches, step))
        return found

    def read_batch_rollouts(self, step: int) -> list[bytes]:
        return self._read_checked(lambda client: self._read_named_rollouts(client, step))

    def _read_named_rollouts(self, client: redis.Redis, step: int) -> list[bytes]:
        indexes = [int(index) for index in (client.execute_command("HGET", self._indexes, step) or b"").split()]
        samples: dict[int, list[tuple[int, bytes]]] = {index: [] for index in indexes}
        for name in client.execute_command("HKEYS", f"{self._rollouts}:{step}"):
            index, sample = map(int, name.split(b":"))
            samples.get(index, []).append((sample, name))
        names = [name for index in indexes for _, name in sorted(samples[index])]
        return [value[4:] for _, value in self._read_values(client, step, names)]  # the first 4 bytes: the attempt

    def list_batch_steps(self) -> list[int]:
        return self._read_checked(lambda client: sorted(map(int, client.execute_command("HKEYS", self._batches))))

    def finish_step(self, step: int, report: dict[str, Any]) -> None:
        self._apply_operation("finish", step, json.dumps(report), REPORTS_KEPT)

    def set_report(self, step: int, report: dict[str, Any]) -> None:
        self._apply_operation("report", step, json.dumps(report))

    def read_last_trained_step(self) -> int:
        return self._read_checked(lambda client: int(client.execute_command("HGET", self._meta, "trained") or 0))

    def read_reports(self, after: int = 0) -> list[dict[str, Any]]:
        def decode_reports(client: redis.Redis) -> list[dict[str, Any]]:
            found = client.execute_command("HGETALL", self._reports)
            steps = sorted((int(step), report) for step, report in found.items())
            return [json.loads(report) for step, report in steps if step > after]

        return self._read_checked(decode_reports)

    def forget_batches(self, up_to: int) -> None:
        self._apply_operation("forget", up_to)

    def reset(self) -> None:
        self._apply_operation("reset")

    def describe(self) -> dict[str, Any]:
        def read_meta(client: redis.Redis) -> dict[str, Any]:
            meta = client.execute_command("HGETALL", self._meta)
            found = {name.decode(): value.decode() for name, value in meta.items()}
            return {
                "kind": "redis",
                "place": self._key_location,
                "schemaVersion": int(found.get("schema", SCHEMA_VERSION)),
                "claimedBy": found.get("owner"),
                "writes": int(found.get("sequence", 0)),
            }

        return self._read_checked(read_meta)

    def close(self) -> None:
        self._server.disconnect()

    # -- claims and write numbers --------------------------------------------------------------------------------

    def _claim_keys(self, claim: Claim) -> int:
        """Claim the keys. Returns the number of the last write. Raises StoreInvalid when they are not this run's."""
        arguments = (SCHEMA_VERSION, claim.run_id, claim.token, claim.owner)
        outcome, detail = self._server.run_on_primary(lambda client: self._run_script(client, _CLAIM, arguments))
        if outcome == "schema":
            self._refuse_schema(detail)
        if outcome == "run":
            raise StoreInvalid(
                f"store.redis.keyPrefix must be unique to this run, got {self._prefix}:*, which holds another run's "
                f"state (id {detail}); choose another keyPrefix, or reset the store of that run. If it is this run and "
                "its folder was lost, write that id to the file store-id of the new folder"
            )
        if outcome == "foreign":
            raise StoreInvalid(
                f"store.redis.keyPrefix must hold only keys that specrl wrote, got others under {self._prefix}:*; "
                "choose another keyPrefix"
            )
        return int(detail)

    def _check_readable(self) -> None:
        schema = self._server.run_on_primary(lambda client: client.execute_command("HGET", self._meta, "schema"))
        if schema is None:
            raise StoreInvalid(
                f"the store must hold the run's state, got no keys under {self._prefix}:*; start the run first"
            )
        if int(schema) != SCHEMA_VERSION:
            self._refuse_schema(schema.decode())

    def _refuse_schema(self, found: str) -> None:
        raise StoreInvalid(
            f"the store must have schema version {SCHEMA_VERSION}, got {found} under {self._prefix}:*; use the version "
            "of specrl that wrote it, or start a new run"
        )

    def _explain_refusal(self, client: redis.Redis) -> str:
        """Return why this primary must not be used; empty when it has every acknowledged write and our claim."""
        if self._claim is None or self._acknowledged < 0:
            return ""
        token, sequence, owner = client.execute_command("HMGET", self._meta, "token", "sequence", "owner")
        if sequence is None:
            return "holds no state of the run: it was reset or lost its data; restore the data, or resume without them"
        if int(sequence) < self._acknowledged:
            return (
                f"has lost acknowledged writes: its last is number {int(sequence)}, but {self._acknowledged} was "
                "acknowledged; restore its newest data, or resume the run from the data that it has"
            )
        if token is None or token.decode() != self._claim.token:
            return (
                f"was claimed by {owner.decode() if owner else 'nobody'}: a newer coordinator has taken the run over; "
                "this coordinator stops, and has written nothing since"
            )
        return ""

    def _apply_operation(self, operation: str, *arguments: Argument) -> str:
        """Apply one operation. Idempotent: it may have been applied before, if the answer was lost.

        Returns `first` when the operation has certainly created a batch, otherwise `done`.
        """
        if self._claim is None:
            raise StoreInvalid("the store must be claimed to be written, got a reader; open it with a claim")
        token = self._claim.token

        def apply_once(client: redis.Redis) -> tuple[str, int]:
            outcome, last = self._run_script(client, _WRITE, (token, self._acknowledged + 1, operation, *arguments))
            return outcome, int(last)

        outcome, last = self._server.run_on_primary(apply_once)
        if outcome == "number" and last > self._acknowledged:
            # The answer of an earlier write was lost, so the server is ahead. Write again under the next number.
            self._acknowledged = last
            outcome, last = self._server.run_on_primary(apply_once)
        if outcome not in ("done", "first"):
            # Not a final verdict: the claim may be another's, or the server may have lost writes or been demoted. The
            # next call reconnects, and `_explain_refusal` tells which.
            self._server.disconnect()
            raise StoreFailed("the store refused a write, with another claim or write number; reconnecting to retry")
        self._acknowledged = last
        return outcome

    def _run_script(self, client: redis.Redis, script: str, arguments: Sequence[Argument]) -> tuple[str, str]:
        """Run a script and wait for `replicaAcks` replicas. Returns the script's outcome and its value.

        The socket timeout bounds both. Raises StoreFailed when too few replicas confirm in time; the write itself may
        be applied then.
        """
        call = ("EVAL", script, len(self._keys), *self._keys, *arguments)
        wanted = self._settings.replica_acks
        if wanted:
            # WAIT counts the writes of its own connection, so both commands go through one pipeline. Its timeout, in
            # milliseconds, is 80 % of the socket's, so that WAIT answers before the socket gives up.
            with client.pipeline(transaction=False) as pipeline:
                pipeline.execute_command(*call)
                pipeline.execute_command("WAIT", wanted, self._settings.timeout_s * 800)
                reply, confirmed = pipeline.execute()
            if confirmed < wanted:
                raise StoreFailed(
                    f"{confirmed} of {wanted} replicas of the store confirmed a write within "
                    f"{self._settings.timeout_s * 0.8:g} s; the run waits, and retries until all do"
                )
        else:
            reply = client.execute_command(*call)
        outcome, detail = reply
        return outcome.decode(), detail.decode() if isinstance(detail, bytes) else str(detail)

    @property
    def _key_location(self) -> str:
        return f"{self._server.addresses_text} {self._prefix}:*"

    def _read_checked[T](self, work: Callable[[redis.Redis], T]) -> T:
        """Read with `work`, then check that the server has every acknowledged write.

        The check comes after the read, so that a failover between the two cannot go unnoticed.
        """

        def read_and_check(client: redis.Redis) -> T:
            with translate_decode_errors(self._key_location):
                found = work(client)
                reason = self._explain_refusal(client)
            if reason:
                raise StoreFailed(f"the store was read from a server that {reason}")
            return found

        return self._server.run_on_primary(read_and_check)


def _check_size(size_bytes: int, what: str) -> None:
    if size_bytes > LARGEST_BYTES:
        raise StoreInvalid(
            f"{what} must be <= {LARGEST_BYTES} bytes for Redis, got {size_bytes}; lower promptsPerStep or groupSize, "
            "or use store.sqlite"
        )
