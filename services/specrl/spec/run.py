"""RunSpec: everything that defines a run, in one model."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import Change, DecimalString, ObjectName, OnCluster, PathText, Section
from specrl.spec.cluster import (
    CoordinatorPod,
    FailurePolicy,
    ManagedBy,
    PeerTls,
    Placement,
    Scheduling,
    Seconds,
    Volume,
)
from specrl.spec.data import NotNegative, Positive, Prompts, RewardPool, Rewards, Validation
from specrl.spec.generation import Generation
from specrl.spec.sinks import Sinks
from specrl.spec.store import RedisStore, Store
from specrl.spec.tools import Tools
from specrl.spec.trainer import Trainer


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Model(Section):
    """The policy to start from."""

    path: PathText
    """Hugging Face folder with config, safetensors and tokenizer. Relative to the run file's folder."""
    dtype: Dtype = Dtype.BFLOAT16
    """Precision of weights and activations, in generation and training alike. Optimizer state is float32."""
    max_length: Positive = 2048
    """Longest prompt plus completion, in tokens."""


class Order(StrEnum):
    IN_ORDER = "InOrder"
    WINDOWED = "Windowed"


class Schedule(Section):
    """How many steps, of what, and how far generation may run ahead."""

    steps: NotNegative
    """Optimizer steps. 0 initialises and exports only."""
    prompts_per_step: Positive
    """Prompts (groups) that one step trains on."""
    group_size: Annotated[int, Field(ge=2)]
    """Rollouts per prompt."""
    max_policy_lag: NotNegative = 1
    """Hard bound, in steps, on the age of the oldest token trained on. 0 is synchronous training."""
    order: Order = Order.IN_ORDER
    """Which groups a step trains. InOrder: those of its own place in the stream. Windowed: the first promptsPerStep
    that are finished, so that they may overtake one with a long rollout until maxPolicyLag makes that one due; then
    the step waits for it. Both train every prompt once, whatever its length. With maxPolicyLag 0 they are the same."""
    seed: int = 0
    """Seeds sampling and initialisation. With maxPolicyLag 0 the same seed gives the same checkpoint, bit for bit."""


class Transport(StrEnum):
    AUTO = "Auto"
    GLOO = "Gloo"
    NCCL = "Nccl"
    CHECKPOINT = "Checkpoint"


class KvCache(StrEnum):
    KEEP = "Keep"
    RECOMPUTE = "Recompute"


class Weights(Section):
    """How a new version of policy and drafter reaches the replicas."""

    transport: Transport = Transport.AUTO
    """How bytes travel. Auto: NCCL where trainer and replicas have GPUs, Gloo otherwise. Checkpoint: no collective; the
    trainer writes each version into the run's directory, which must be mounted under the same path at every replica."""
    bucket_mib: Positive = 64
    """Tensors are sent in buckets (or files) of about this size, in MiB."""
    timeout_s: Positive = 120
    """Deadline of every collective and of every stage of an update, in seconds."""
    attempts: Positive = 3
    """How often one update is tried before the replica is ejected."""
    kv_cache: KvCache = KvCache.KEEP
    """What unfinished rollouts do with the KV cache of the version before: keep it, or recompute it."""


class Canary(Section):
    """A few short rollouts of every updated replica, re-scored by the trainer: do both have the same policy?

    A replica beyond a bound is sent the weights once more; the run ends if it is beyond it again.
    """

    every_steps: NotNegative = 1
    """Policy versions from one canary to the next; a replica that has just joined always has one. 0: no canary."""
    rollouts_per_replica: Positive = 2
    """Rollouts of each replica, for prompts of the run's own stream. They are never trained on."""
    max_tokens: Positive = 16
    """Longest of these rollouts, in tokens, unless generation.sampling.maxTokens is shorter."""
    max_mean_abs: DecimalString | None = None
    """Largest mean absolute difference of sampler and trainer log-probabilities over one replica's canary, in nats.
    Null: "0.001" for float32, "0.05" for bfloat16."""
    max_abs: DecimalString | None = None
    """Largest absolute difference at any one token, in nats. Null: "0.01" for float32, "1" for bfloat16."""
    timeout_s: Positive = 30
    """Seconds that the trainer waits for a canary, whose requests may queue behind running rollouts. What has not come
    back by then is skipped, and counted."""


_MIRROR = r"^[a-z][a-z0-9+.-]*://[^@\s]+$"
"""A URL of fsspec, without a user or password, which have no place in a run file."""


class Checkpoint(Section):
    """Trainer checkpoints: policy, drafter, optimizers, random state, place in the data."""

    every_steps: Positive = 10
    """Steps between checkpoints; one is always written after the last step."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    milestone_every_steps: Positive | None = None
    """Checkpoints of steps that are multiples of this are kept for ever. Null: none is."""
    mirror: Annotated[str, Field(max_length=4096, pattern=_MIRROR)] | None = None
    """Where complete checkpoints are copied to, as s3://bucket/folder, gs://, abfs:// or file:///folder; a place for
    this run alone. A checkpoint counts when its copy is complete; a trainer without checkpoints in its folder fetches
    the newest. Credentials come from the trainer's environment (docs/checkpoints.md). Null: none are copied."""
    claim_name: Annotated[ObjectName | None, OnCluster.ONLY] = None
    """PersistentVolumeClaim that holds the run's folder on a cluster: checkpoints, the exported model, metrics. Trainer
    and coordinator both mount it. A local run does not use it. Null: the folder is lost with its pod."""


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_URL = rf"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:{_PORT})?(/[A-Za-z0-9._~/-]*)?$"
"""Without a user's name or password, which have no place in a run file."""


class Traces(Section):
    """OpenTelemetry: every process exports what it does, and when, as one trace for each step (docs/traces.md).

    Needs the extra `traces`. What is not said here the standard variables OTEL_* of each process say.
    """

    endpoint: Annotated[str | None, Field(max_length=2048, pattern=_URL)] = None
    """Where a collector receives OTLP over HTTP, without the path /v1/traces, as http://collector:4318. Null:
    OTEL_EXPORTER_OTLP_ENDPOINT says where; without that, http://localhost:4318."""


class Telemetry(Section):
    """Logs, endpoints and traces."""

    log_level: LogLevel = LogLevel.INFO
    """Least severe event that is logged."""
    http_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the coordinator's status page and metrics. 0: any free one."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the coordinator's gRPC server. 0: any free one."""
    rollouts_shown: Annotated[int, Field(ge=0, le=256)] = 0
    """Newest rollouts that the coordinator keeps in memory, one of each group, with prompt, completion and verdict, for
    whoever may read the run (GET /rollouts). 0: none, since prompts may be private."""
    heartbeat_s: Positive = 2
    """Seconds between heartbeats. A peer that misses five is taken for dead."""
    traces: Traces | None = None
    """Export traces. Null: none are, and nothing of OpenTelemetry is loaded."""
    sinks: Sinks = Sinks()
    """Where the numbers of each step go besides the run's own files."""


class RunSpec(Section):
    """A run: what is trained, on what, how rollouts are drawn, and how the parts are kept in step."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,32}[a-z0-9])?$")]
    """Name of the run: at most 34 lower-case letters, digits and dashes, beginning with a letter."""
    model: Model
    prompts: Prompts
    rewards: Rewards
    reward_pool: RewardPool = RewardPool()
    tools: Tools | None = None
    generation: Generation
    trainer: Trainer
    schedule: Schedule
    weights: Weights = Weights()
    canary: Canary = Canary()
    store: Store | None = None
    """Where the coordinator's state is kept. Null: in a SQLite file in the run's folder; on a cluster, in a Redis
    server that the operator starts for the run."""
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation | None = None
    telemetry: Telemetry = Telemetry()
    suspend: Annotated[bool, Change.ANY_TIME, OnCluster.ONLY] = False
    """True removes all pods and keeps checkpoints and progress; false goes on from them. Kueue and users set it. A
    local run does not use it, nor any of the fields below."""
    managed_by: Annotated[ManagedBy | None, OnCluster.ONLY] = None
    """Which controller runs the job. Null: specrl's operator."""
    coordinator: Annotated[CoordinatorPod, OnCluster.ONLY] = CoordinatorPod()
    volumes: Annotated[tuple[Volume, ...], Field(max_length=16), Change.SUSPENDED, OnCluster.ONLY] = ()
    """Persistent volume claims that every pod of the run mounts, read only; for models and data."""
    placement: Annotated[Placement, OnCluster.ONLY] = Placement()
    scheduling: Annotated[Scheduling, Change.SUSPENDED, OnCluster.ONLY] = Scheduling()
    failure_policy: Annotated[FailurePolicy, Change.ANY_TIME, OnCluster.ONLY] = FailurePolicy()
    tls: Annotated[PeerTls, OnCluster.ONLY] = PeerTls()
    startup_deadline_seconds: Annotated[Seconds | None, Change.ANY_TIME, OnCluster.ONLY] = None
    """Seconds from the job's start, or its resumption, until all parts are ready; the job has failed if they are not.
    Null: no limit."""
    active_deadline_seconds: Annotated[Seconds | None, Change.ANY_TIME, OnCluster.ONLY] = None
    """Seconds that the job may run, from its start or its resumption. Null: no limit."""
    ttl_seconds_after_finished: Annotated[
        Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] | None, Change.ANY_TIME, OnCluster.ONLY
    ] = None
    """Seconds after which a finished job is deleted. Null: it stays."""

    @property
    def redis(self) -> RedisStore | None:
        """The Redis server that keeps the run's state; None: a SQLite file does."""
        return self.store.redis if self.store is not None else None
