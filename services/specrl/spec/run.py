"""RunSpec, the whole run file, and its sections about model, schedule, weights, canary, checkpoints and telemetry."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import (
    ChangePolicy,
    DecimalString,
    HubName,
    ObjectName,
    OnCluster,
    PathText,
    Port,
    RelativePath,
    Section,
    ShortText,
    WholeNumber,
)
from specrl.spec.cluster import (
    CoordinatorPod,
    FailurePolicy,
    ManagedBy,
    PeerTls,
    Placement,
    Scheduling,
    Seconds,
    StoreServer,
    Volume,
)
from specrl.spec.data import NotNegative, Positive, Prompts, RewardPool, Rewards, Validation
from specrl.spec.generation import Generation
from specrl.spec.sinks import Sinks
from specrl.spec.store import RedisStore, Store
from specrl.spec.tools import Tools
from specrl.spec.trainer import Trainer


class Dtype(StrEnum):
    AUTO = "Auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Model(Section):
    """The policy to start from."""

    path: Annotated[PathText, RelativePath.TO_RUN_FILE, HubName.ALLOWED]
    """Hugging Face folder with config, safetensors and tokenizer, or a model's name on the hub, such as
    Qwen/Qwen3-0.6B, or a GGUF file. A relative path is relative to the run file's folder. If that folder exists, it is
    used; `./NAME` is always a folder. Otherwise OWNER/NAME is fetched before the run starts, and a GGUF file is
    converted (docs/hub.md)."""
    revision: ShortText | None = None
    """Branch, tag or commit of a model on the hub. Null: its main branch."""
    dtype: Dtype = Dtype.AUTO
    """Precision of weights and activations in generation and training. Optimizer state is float32. `Auto`: bfloat16 on
    GPUs and on CPUs with bfloat16 units, else float32. It is chosen once, written into the run's own file, and kept
    when the run is resumed. On a cluster: float32 with placement.profile `CPU`, else bfloat16."""
    max_length: Positive = 2048
    """Longest sequence that an engine computes, in tokens: at least prompts.maxTokens + generation.sampling.maxTokens +
    the number of draft tokens + 1."""


class Schedule(Section):
    """Number and size of steps, and how far generation may run ahead of training."""

    steps: NotNegative
    """Number of steps. 0: initialise and export only."""
    prompts_per_step: Positive
    """Prompts, that is groups, of one step's batch."""
    # With a single rollout, an advantage relative to its group would be 0 or undefined.
    group_size: Annotated[WholeNumber, Field(ge=2)]
    """Rollouts per prompt."""
    max_policy_lag: NotNegative = 1
    """Hard bound on the policy lag of the oldest token trained on, in steps. 0: synchronous training."""
    seed: WholeNumber = 0
    """Seed of sampling and initialisation. With maxPolicyLag 0 and generation.draftLength `Fixed`, the same seed gives
    the same checkpoint, bit for bit, on the same machine. docs/policy-versions.md lists what does not repeat."""


class Transport(StrEnum):
    AUTO = "Auto"
    GLOO = "Gloo"
    NCCL = "Nccl"
    CHECKPOINT = "Checkpoint"


class KvCache(StrEnum):
    KEEP = "Keep"
    RECOMPUTE = "Recompute"


class Weights(Section):
    """How new weights of policy and drafter reach the replicas."""

    transport: Transport = Transport.AUTO
    """Transport of weights. `Auto`: NCCL if trainer and replicas have a GPU for each rank, else Gloo. `Checkpoint`: no
    collective; the trainer writes each version into the run's folder, which every replica must mount at the same
    path."""
    bucket_mib: Positive = 64
    """Approximate size of the buckets (or files) that tensors are sent in, in MiB."""
    timeout_s: Positive = 120
    """Deadline of every collective of an update, in seconds. A phase, such as transfer or load, may take this and 8
    seconds for each GB of weights more."""
    attempts: Positive = 3
    """Attempts of one update before the replica is ejected."""
    kv_cache: KvCache = KvCache.KEEP
    """KV cache of unfinished rollouts after an update. `Keep`: they use the previous version's cache. `Recompute`: it
    is computed again with the new weights."""


class Canary(Section):
    """Checks that updated replicas have the trainer's policy: the trainer re-scores a few short rollouts of each.

    A replica that exceeds a bound gets the weights once more. If it exceeds the bound again, the run ends.
    """

    every_steps: NotNegative = 1
    """Policy versions from one canary to the next. A replica that has just joined always has one. 0: no canary."""
    rollouts_per_replica: Positive = 2
    """Canary rollouts of each replica, for prompts of the run's own stream. They are never trained on."""
    max_tokens: Positive = 16
    """Longest canary rollout, in tokens, unless generation.sampling.maxTokens is smaller."""
    max_mean_abs: DecimalString | None = None
    """Largest mean absolute difference of sampler and trainer log-probabilities over one replica's canary, in nats.
    Null: "0.001" for float32, "0.05" for bfloat16."""
    max_abs: DecimalString | None = None
    """Largest absolute difference at a single token, in nats. Null: "0.01" for float32, "1" for bfloat16."""
    timeout_s: Positive = 30
    """Seconds that the trainer waits for a canary, whose requests may queue behind running rollouts. A canary that is
    late is skipped and counted."""


_MIRROR = r"^[a-z][a-z0-9+.-]*://[^@\s]+$"
"""A URL for fsspec without user and password, since run files must not contain credentials."""


# No part is empty or begins with a dot, so that the path cannot leave the claim.
_FOLDER = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"
"""A relative path of folders."""


class CheckpointOrigin(Section):
    """A checkpoint of another run, on a claim in the job's namespace."""

    claim_name: ObjectName
    """PersistentVolumeClaim that has it, such as the other run's checkpoint.claimName. It may be this run's own."""
    folder: Annotated[str, Field(max_length=1024, pattern=_FOLDER)]
    """Folder on the claim. A run's folder, such as qwen-1a2b3c4d, stands for its newest undamaged checkpoint.
    qwen-1a2b3c4d/checkpoints/step-000010 is one checkpoint."""


class Checkpoint(Section):
    """Trainer checkpoints: policy, drafter, optimizers, random state, position in the data."""

    every_steps: Positive = 10
    """Steps between checkpoints. One is always written after the last step."""
    keep: Positive = 2
    """Number of newest checkpoints that are kept."""
    milestone_every_steps: Positive | None = None
    """Checkpoints of steps that are multiples of this are never deleted. Null: all but the newest are deleted."""
    keep_best: bool = False
    """Also keep the checkpoint whose version had the best validation reward, of those that were validated. Choose
    validation.everySteps and everySteps so that the same steps are validated and saved."""
    mirror: Annotated[str, Field(max_length=4096, pattern=_MIRROR)] | None = None
    """URL of a folder that complete checkpoints are copied to: s3://bucket/folder, gs://, abfs:// or file:///folder. No
    other run may use it. A checkpoint counts once its copy is complete. A trainer without checkpoints in its own folder
    fetches the newest copy. Credentials come from the trainer's environment (docs/checkpoints.md). Null: no copies."""
    claim_name: Annotated[ObjectName | None, OnCluster.ONLY] = None
    """PersistentVolumeClaim of the run's folder on a cluster: checkpoints, exported model, metrics. Trainer and
    coordinator mount it. A local run ignores it. Null: the folder is deleted with its pod."""
    origin: Annotated[CheckpointOrigin | None, Field(alias="from"), OnCluster.ONLY] = None
    """Checkpoint of another run to start from, such as one of an RLJob that has failed. The trainer copies it to the
    run's folder, unless that has a checkpoint already. A local run ignores it and has `--checkpoint`. Null: the run
    starts from model.path."""


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


# 1 to 65535, as a pattern: a schema has no other way to check a number in text.
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_URL = rf"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:{_PORT})?(/[A-Za-z0-9._~/-]*)?$"
"""An HTTP URL without user and password, since run files must not contain credentials."""


class Traces(Section):
    """OpenTelemetry traces: every process exports its spans, one trace per step (docs/traces.md).

    Needs the extra `traces`. Each process also reads OpenTelemetry's standard variables OTEL_*.
    """

    endpoint: Annotated[str | None, Field(max_length=2048, pattern=_URL)] = None
    """URL of a collector that receives OTLP over HTTP, without the path /v1/traces, such as http://collector:4318.
    Null: OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318 if that is not set."""


class Telemetry(Section):
    """Logs, endpoints and traces."""

    log_level: LogLevel = LogLevel.INFO
    """Least severe level that is logged."""
    http_port: Port = 0
    """Port of the coordinator's status page and metrics. 0: any free port. On a cluster it is always 8080."""
    grpc_port: Port = 0
    """Port of the coordinator's gRPC server. 0: any free port. On a cluster it is always 7000."""
    rollouts: Annotated[WholeNumber, Field(ge=0, le=64)] = 4
    """Rollouts of each step that are written to rollouts.jsonl in the run's folder, with prompt, completion and reward.
    They are of different prompts as far as possible. `specrl rollouts RUN` shows them. At 32 MiB the file becomes
    rollouts.old.jsonl, so that both have at most 64 MiB. 0: none, for prompts that must not be in the run's folder."""
    rollouts_shown: Annotated[WholeNumber, Field(ge=0, le=256)] = 0
    """Number of newest rollouts that the coordinator keeps in memory, one of each group, with prompt, completion and
    reward. Users who may read the run can see them (GET /rollouts). 0: none, since prompts may be private."""
    heartbeat_s: Positive = 2
    """Seconds between heartbeats. A peer that misses five counts as dead."""
    traces: Traces | None = None
    """Trace export. Null: no traces, and OpenTelemetry is not imported."""
    sinks: Sinks = Sinks()
    """Programs that get the metrics of each step, besides the run's own files."""


class RunSpec(Section):
    """A run: the policy, its prompts and rewards, generation, training, and the run's resources on a cluster."""

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
    """Store of the coordinator's durable state. Null: a SQLite file in the run's folder; on a cluster, a Redis server
    that the operator starts for the run."""
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation | None = None
    telemetry: Telemetry = Telemetry()
    suspend: Annotated[bool, ChangePolicy.ANY_TIME, OnCluster.ONLY] = False
    """True: all pods are deleted; checkpoints and progress are kept. False: the run continues from them. Users and
    Kueue set it. A local run ignores this field and all below."""
    managed_by: Annotated[ManagedBy | None, OnCluster.ONLY] = None
    """Controller that reconciles the job. Null: specrl's operator."""
    coordinator: Annotated[CoordinatorPod, OnCluster.ONLY] = CoordinatorPod()
    store_server: Annotated[StoreServer, OnCluster.ONLY] = StoreServer()
    volumes: Annotated[tuple[Volume, ...], Field(max_length=16), ChangePolicy.SUSPENDED, OnCluster.ONLY] = ()
    """Claims, container images and what is fetched from the hub or an object store, for models and data. Every pod of
    the run mounts them read-only."""
    cache_claim_name: Annotated[ObjectName | None, ChangePolicy.SUSPENDED, OnCluster.ONLY] = None
    """PersistentVolumeClaim for what trainer and replicas compile: torch.compile's graphs, Triton's and FlashInfer's
    kernels. It is ReadWriteMany where they are on several nodes, and several jobs may share it. Null: every pod
    compiles anew, into its scratch folder."""
    placement: Annotated[Placement, OnCluster.ONLY] = Placement()
    scheduling: Annotated[Scheduling, ChangePolicy.SUSPENDED, OnCluster.ONLY] = Scheduling()
    failure_policy: Annotated[FailurePolicy, OnCluster.ONLY] = FailurePolicy()
    tls: Annotated[PeerTls, OnCluster.ONLY] = PeerTls()
    startup_deadline_seconds: Annotated[Seconds | None, ChangePolicy.ANY_TIME, OnCluster.ONLY] = None
    """Most seconds from the job's start, or its resumption, until all parts are ready. If they are not, the job fails.
    Null: no limit."""
    active_deadline_seconds: Annotated[Seconds | None, ChangePolicy.ANY_TIME, OnCluster.ONLY] = None
    """Most seconds that the job may run, from its start or its resumption. After them the job fails. Null: no limit."""
    ttl_seconds_after_finished: Annotated[
        Annotated[WholeNumber, Field(ge=0, le=2**31 - 1)] | None, ChangePolicy.ANY_TIME, OnCluster.ONLY
    ] = None
    """Seconds after which a finished job is deleted. Null: as long as the operator is told to keep finished jobs, by
    default for ever."""

    @property
    def runs_programs(self) -> bool:
        """Whether programs that the policy writes run in a sandbox."""
        is_tool = self.tools is not None and self.tools.answered_by.code is not None
        return is_tool or any(verifier.code is not None for verifier in self.rewards.verifiers)

    @property
    def redis(self) -> RedisStore | None:
        """The Redis server of the run's store; None if none is given."""
        return self.store.redis if self.store is not None else None
