"""For every rule of the spec, an RLJob that only this rule refuses, and a similar one that it accepts.

Tests compare both forms of a rule, in Python (`specrl.spec.load`) and in CEL. Unit tests run CEL with
`tests/rljob_admission.py`, and the e2e tier with a real API server.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from specrl.spec import RunSpec
from specrl.spec.rljob.manifest import API_VERSION, KIND

Changes = dict[str, Any]

SOUND: dict[str, Any] = {
    "model": {"path": "/models/policy"},
    "prompts": {"source": {"jsonl": {"path": "/models/train.jsonl"}}},
    "rewards": {"math": {}},
    "generation": {"sampling": {"maxTokens": 64}},
    "trainer": {"optimizer": {"learningRate": "1e-5"}},
    "schedule": {"steps": 3, "promptsPerStep": 2, "groupSize": 4},
    "checkpoint": {"claimName": "runs"},
    "placement": {"profile": "CPU"},
}


def manifest_of(spec: RunSpec, namespace: str | None = None) -> dict[str, Any]:
    """Make the RLJob of a run with every default and without nulls, as an API server would store it."""
    fields = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    metadata = {"name": fields.pop("name")} | ({} if namespace is None else {"namespace": namespace})
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": fields}


def a_job(changes: Changes | None = None, name: str = "job") -> dict[str, Any]:
    """Make a valid RLJob with values at dotted paths of its spec; `...` removes a field."""
    spec = copy.deepcopy(SOUND)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        place = spec
        for part in parents:
            place = place.setdefault(part, {})
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = copy.deepcopy(value)
    return {"apiVersion": "specrl.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": spec}


@dataclass(frozen=True)
class Case:
    """One rule. path: of its problem. refused, accepted: changes of a valid job."""

    path: str
    refused: Changes
    accepted: Changes
    must: str = "must"
    """The beginning of the message, which distinguishes rules of one field."""


def _at(path: str, refused: Any, accepted: Any, must: str = "must") -> Case:
    """Build a case of one field's value."""
    return Case(path, {path: refused}, {path: accepted}, must)


_REDIS: dict[str, Any] = {"addresses": ["redis:6379"]}
_SENTINEL: dict[str, Any] = {"addresses": ["watch:1"], "masterName": "main"}
_TOOLS: dict[str, Any] = {"answeredBy": {"code": {}}, "maxOutputTokens": 4}
_JSONL: dict[str, Any] = {"jsonl": {"path": "/models/train.jsonl"}}
_PARQUET: dict[str, Any] = {"parquet": {"path": "/models/test"}}
_SOURCES: list[dict[str, Any]] = [{"name": "math", "source": _JSONL}]
_VALIDATION: dict[str, Any] = {"source": {"parquet": {"path": "/models/test"}}}
_ONE_REPLICA = {"generation.gpusPerReplica": 4, "generation.tensorParallel": 4}
_TRAINER = {"trainer.gpusPerNode": 4, "trainer.parallelism": {"tensor": 4}}
_GB200 = {"placement.profile": "GB200", **_ONE_REPLICA, **_TRAINER}
_GENERIC = {"placement.profile": "Generic", "generation.gpusPerReplica": 1, "trainer.gpusPerNode": 1}


def _redis(path: str, refused: Any, accepted: Any, must: str = "must") -> Case:
    """Build a case of one field of a Redis store."""
    changes = ({"store.redis": _REDIS, f"store.redis.{path}": value} for value in (refused, accepted))
    return Case(f"store.redis.{path}", *changes, must)


def _tools(path: str, refused: Any, accepted: Any, must: str = "must") -> Case:
    """Build a case of one field of the tools."""
    changes = ({"tools": _TOOLS, f"tools.{path}": value} for value in (refused, accepted))
    return Case(f"tools.{path}", *changes, must)


def _gb200(path: str, refused: Changes, accepted: Changes, must: str = "must") -> Case:
    """Build a case of a job with GPUs on GB200 nodes."""
    return Case(path, _GB200 | refused, _GB200 | accepted, must)


def _generic(path: str, refused: Changes, accepted: Changes, must: str = "must") -> Case:
    """Build a case of a job with GPUs on nodes of any kind."""
    return Case(path, _GENERIC | refused, _GENERIC | accepted, must)


def _sum_of(*terms: Any) -> Any:
    """Build the rewards of several terms."""
    return {"sum": {"terms": list(terms)}}


_EXACT: dict[str, Any] = {"verifier": {"exact": {}}}

UNIONS = (
    _at("prompts.source", {"jsonl": {"path": "/a"}, "parquet": {"path": "/b"}}, {"parquet": {"path": "/b"}}),
    _at("rewards", {"math": {}, "exact": {}}, {"exact": {}}),
    Case(
        "rewards.sum.terms.0.verifier",
        {"rewards": _sum_of({"name": "a", "verifier": {}})},
        {"rewards": _sum_of({"name": "a", "verifier": {"tags": {}}})},
    ),
    _at("generation.speculation", {}, {"ngram": {}}),
    _at("store", {"sqlite": {}, "redis": _REDIS}, {"sqlite": {}}),
    _redis("password", {}, {"environment": "SECRET"}),
    _tools("answeredBy", {}, {"python": {"function": "mine:answer"}}),
)

DECIMALS = (
    _at("generation.sampling.temperature", "0", "0.01"),
    _at("generation.sampling.temperature", "2.01", "2"),
    _at("generation.sampling.topP", "0", "1.0"),
    _at("generation.sampling.topP", "1.01", "0.9"),
    _at("generation.gpuMemoryUtilization", "0", "1"),
    _at("generation.gpuMemoryUtilization", "1.01", "0.5"),
    _at("trainer.optimizer.learningRate", "0", "1e-99"),
    _at("trainer.optimizer.epsilon", "-1e-8", "+.5"),
    _at("trainer.optimizer.clipNorm", "0.0", "1e9"),
    _at("trainer.loss.clipHigh", "0e5", "5."),
    _at("trainer.loss.clipLow", "-0.2", "0.2"),
    _at("trainer.drafter.learningRate", "0", "1e-3"),
    _at("trainer.drafter.clipNorm", "-1", "1"),
    _at("canary.maxMeanAbs", "0", "0.001"),
    _at("canary.maxAbs", "-0.5", "0.5"),
    _at("trainer.optimizer.beta1", "1", "0.999"),
    Case(
        "trainer.optimizer.muon.learningRate",
        {"trainer.optimizer": {"kind": "Muon", "learningRate": "1", "muon": {"learningRate": "0"}}},
        {"trainer.optimizer": {"kind": "Muon", "learningRate": "1", "muon": {"learningRate": "1e-3"}}},
    ),
    Case(
        "trainer.optimizer.muon.momentum",
        {"trainer.optimizer": {"kind": "Muon", "learningRate": "1", "muon": {"momentum": "1"}}},
        {"trainer.optimizer": {"kind": "Muon", "learningRate": "1", "muon": {"momentum": "0.9"}}},
    ),
    _at("trainer.optimizer.beta2", "-0.1", "0"),
    _at("trainer.drafter.initialisation.heldOut", "1.5", "0"),
    _at("trainer.drafter.initialisation.minGain", "-0.01", "0"),
    Case(
        "trainer.drafter.initialisation.maxPrompts",
        {"trainer.drafter.initialisation": {"prompts": 64, "maxPrompts": 63}},
        {"trainer.drafter.initialisation": {"prompts": 64, "maxPrompts": 64}},
    ),
    _at("trainer.optimizer.weightDecay", "-0.1", "0"),
    _at("trainer.optimizer.finalLearningRate", "-1", "0"),
    _at("trainer.loss.correction.low", "-1", "0"),
    _at("trainer.loss.correction.high", "0", "0.1"),
    Case(
        "trainer.loss.rolloutMask.ratioLow",
        {"trainer.loss.rolloutMask": {"ratioLow": "0"}},
        {"trainer.loss.rolloutMask": {"ratioLow": "0.9"}},
    ),
    Case(
        "trainer.loss.rolloutMask.ratioHigh",
        {"trainer.loss.rolloutMask": {"ratioHigh": "0"}},
        {"trainer.loss.rolloutMask": {"ratioHigh": "1.1"}},
    ),
    Case(
        "trainer.loss.rolloutMask.maxDivergence",
        {"trainer.loss.rolloutMask": {"maxDivergence": "-1"}},
        {"trainer.loss.rolloutMask": {"maxDivergence": "0"}},
    ),
    Case("trainer.lora.alpha", {"trainer.lora": {"alpha": "0"}}, {"trainer.lora": {"alpha": "0.5"}}),
    Case(
        "trainer.loss.referenceKl.coefficient",
        {"trainer.loss.referenceKl": {"coefficient": "0"}},
        {"trainer.loss.referenceKl": {"coefficient": "0.001"}},
    ),
    Case(
        "trainer.loss.overlong.penalty",
        {"trainer.loss.overlong": {"bufferTokens": 8, "penalty": "0"}},
        {"trainer.loss.overlong": {"bufferTokens": 8, "penalty": "0.5"}},
    ),
    Case(
        "validation.sampling.temperature",
        {"validation": _VALIDATION, "validation.sampling": {"temperature": "-1"}},
        {"validation": _VALIDATION, "validation.sampling": {"temperature": "1"}},
    ),
    Case(
        "validation.sampling.temperature",
        {"validation": _VALIDATION, "validation.sampling": {"temperature": "0.001"}},
        {"validation": _VALIDATION, "validation.sampling": {"temperature": "0"}},
    ),
)

RUN = (
    _at("generation.sampling.topK", 1, 2),
    Case(
        "trainer.parallelism.virtualStages",
        {"trainer.parallelism": {"virtualStages": 2}},
        {"trainer.parallelism": {"virtualStages": 2, "pipeline": 2}},
    ),
    Case(
        "trainer.parallelism.expert",
        {"trainer.parallelism": {"tensor": 2, "data": 2, "expert": 3}},
        {"trainer.parallelism": {"tensor": 2, "data": 2, "expert": 4}},
    ),
    Case(
        "generation.kvCacheMib",
        {"generation.kvCacheMib": 64, "generation.gpuMemoryUtilization": "0.5"},
        {"generation.kvCacheMib": 64},
    ),
    Case(
        "generation.expertParallel",
        {"generation.expertParallel": True},
        {**_GENERIC, "generation.gpusPerReplica": 2, "generation.tensorParallel": 2, "generation.expertParallel": True},
    ),
    Case(
        "generation.maxBatchedTokens",
        {"generation.maxBatchedTokens": 4 * 64 - 1, "generation.speculation": {"ngram": {}}},
        {"generation.maxBatchedTokens": 4 * 64, "generation.speculation": {"ngram": {}}},
    ),
    _at("trainer.microBatchTokens", 512 + 64 - 1, 512 + 64),
    Case(
        "model.maxLength",
        {"model.maxLength": 512 + 64 + 3, "generation.speculation": {"ngram": {}}},
        {"model.maxLength": 512 + 64 + 4, "generation.speculation": {"ngram": {}}},
    ),
    Case(
        "validation.source",
        {"validation": {"source": {"jsonl": {"path": "/models/train.jsonl", "onBadLine": "Fail"}}}},
        {"validation": {"source": {"jsonl": {"path": "/models/train.jsonl", "onBadLine": "Skip"}}}},
    ),
    Case(
        "rewardPool.timeoutS",
        {"rewards": {"code": {"wallS": 10}}, "rewardPool": {"timeoutS": 10}},
        {"rewards": {"code": {"wallS": 10}}, "rewardPool": {"timeoutS": 11}},
    ),
    Case(
        "rewardPool.timeoutS",
        {"rewards": _sum_of({"name": "a", "verifier": {"code": {"wallS": 10}}}), "rewardPool": {"timeoutS": 10}},
        {"rewards": _sum_of({"name": "a", "verifier": {"code": {"wallS": 10}}}), "rewardPool": {"timeoutS": 11}},
        must="must be > wallS of every verifier code in rewards.sum.terms",
    ),
    Case(
        "rewards.code.memoryMib",
        {"rewards": {"code": {"memoryMib": 4097}}},
        {"rewards": {"code": {"memoryMib": 4096}}},
    ),
    Case(
        "rewardPool.memoryMib",
        {"rewards": _sum_of({"name": "a", "verifier": {"code": {"memoryMib": 4097}}})},
        {"rewards": _sum_of({"name": "a", "verifier": {"code": {"memoryMib": 4096}}})},
        must="must be >= memoryMib of every verifier code in rewards.sum.terms",
    ),
    Case(
        "tools.answeredBy.code.memoryMib",
        {"tools": _TOOLS | {"answeredBy": {"code": {"memoryMib": 4097}}}},
        {"tools": _TOOLS | {"answeredBy": {"code": {"memoryMib": 4096}}}},
    ),
    Case(
        "tools.callEnd",
        {"tools": _TOOLS, "generation.sampling.stop": ["end", "so</tool>then"]},
        {"tools": _TOOLS, "generation.sampling.stop": ["end", "<tool>"]},
        "must not be part of a stop",
    ),
    _tools("maxOutputTokens", 64, 63),
    Case(
        "generation.speculation.ngram.lookupMin",
        {"generation.speculation": {"ngram": {"lookupMin": 4}}},
        {"generation.speculation": {"ngram": {"lookupMin": 3}}},
    ),
    Case(
        "checkpoint.keepBest",
        {"checkpoint.keepBest": True},
        {"checkpoint.keepBest": True, "validation": _VALIDATION},
    ),
    Case(
        "checkpoint.milestoneEverySteps",
        {"checkpoint.everySteps": 4, "checkpoint.milestoneEverySteps": 10},
        {"checkpoint.everySteps": 5, "checkpoint.milestoneEverySteps": 10},
    ),
    _at("prompts.template", "no question", "Q: {question}"),
    Case(
        "prompts.source",
        {"prompts": {"source": _JSONL, "sources": _SOURCES}},
        {"prompts": {"sources": _SOURCES}},
    ),
    Case("prompts.source", {"prompts": {}}, {"prompts": {"source": _JSONL}}),
    Case(
        "validation.source",
        {"validation": {"source": _PARQUET, "sources": [{"name": "a", "source": _PARQUET}]}},
        {"validation": {"sources": [{"name": "a", "source": _PARQUET}]}},
    ),
    Case(
        "prompts.sources",
        {"prompts": {"sources": [*_SOURCES, _SOURCES[0]]}},
        {"prompts": {"sources": [*_SOURCES, {**_SOURCES[0], "name": "other"}]}},
    ),
    Case(
        "validation.sources",
        {"validation": {"sources": [{"name": "a", "source": _PARQUET}] * 2}},
        {"validation": {"sources": [{"name": name, "source": _PARQUET} for name in ("a", "b")]}},
    ),
    Case(
        "prompts.sources",  # the API server goes on with [0].template, Python with .0.template
        {"prompts": {"sources": [{**_SOURCES[0], "template": "no question"}]}},
        {"prompts": {"sources": [{**_SOURCES[0], "template": "Q: {question}"}]}},
        "must contain {question}",
    ),
    Case(
        "prompts.format",
        {"prompts.system": "Be brief."},
        {"prompts.system": "Be brief.", "prompts.format": "Chat"},
    ),
    Case(
        "prompts.format",
        {"prompts": {"sources": [{**_SOURCES[0], "fewShot": [{"user": "1+1?", "assistant": "2"}]}]}},
        {"prompts": {"format": "Chat", "sources": [{**_SOURCES[0], "fewShot": [{"user": "1+1?", "assistant": "2"}]}]}},
    ),
    Case(
        "validation",
        {"validation": _VALIDATION, "validation.sampling": {"maxTokens": 1536}},
        {"validation": _VALIDATION, "validation.sampling": {"maxTokens": 1535}},
    ),
    Case(
        "validation",
        {"validation": {"sources": [{"name": "a", "source": _PARQUET, "sampling": {"maxTokens": 1536}}]}},
        {
            "validation": {"sources": [{"name": "a", "source": _PARQUET, "sampling": {"maxTokens": 1535}}]},
            "validation.sampling": {"maxTokens": 1536},  # of sources without their own, and there are none
        },
    ),
    Case(
        "trainer.loss.correction.low",
        {"trainer.loss.correction": {"low": "3"}},
        {"trainer.loss.correction": {"low": "3", "high": "3"}},
    ),
    Case(
        "trainer.loss.rolloutMask.ratioLow",
        {"trainer.loss.rolloutMask": {"ratioLow": "2", "ratioHigh": "1"}},
        {"trainer.loss.rolloutMask": {"ratioLow": "0.9", "ratioHigh": "1"}},
    ),
    Case(
        "trainer.loss.correction.method",
        {"trainer.loss": {"ratioTo": "Sampler"}},
        {"trainer.loss": {"ratioTo": "Sampler", "correction": {"method": "None"}}},
    ),
    Case(
        "trainer.loss.withoutSignal",
        {"trainer.loss": {"advantages": "BatchStandardised", "withoutSignal": "LeaveOut"}},
        {"trainer.loss": {"advantages": "GroupCentredBatchStandardised", "withoutSignal": "LeaveOut"}},
    ),
    Case(
        "trainer.loss.referenceKl.estimator",
        {"trainer.loss.referenceKl": {"coefficient": "1", "estimator": "K1"}},
        {"trainer.loss.referenceKl": {"coefficient": "1", "estimator": "K1", "place": "Reward"}},
    ),
    Case(
        "trainer.optimizer.finalLearningRate",
        {"trainer.optimizer": {"learningRate": "1e-6", "finalLearningRate": "1e-5"}},
        {"trainer.optimizer": {"learningRate": "1e-6", "finalLearningRate": "1e-6"}},
    ),
    Case(
        "trainer.optimizer.kind",
        {"trainer.optimizer": {"learningRate": "1", "muon": {}}},
        {"trainer.optimizer": {"kind": "Muon", "learningRate": "1", "muon": {}}},
        "must be Muon",
    ),
    Case(
        "trainer.optimizer.kind",
        {"trainer.optimizer": {"kind": "Muon", "learningRate": "1"}, "trainer.lora": {"rank": 8}},
        {"trainer.optimizer": {"kind": "Muon", "learningRate": "1"}},
        "must be AdamW",
    ),
    Case(
        "trainer.optimizer.decaySteps",
        {"trainer.optimizer": {"learningRate": "1", "decaySteps": 1}},
        {"trainer.optimizer": {"learningRate": "1", "decaySteps": 1, "decay": "Linear"}},
    ),
    Case(
        "trainer.loss.overlong.bufferTokens",
        {"trainer.loss.overlong": {"bufferTokens": 65}},
        {"trainer.loss.overlong": {"bufferTokens": 64}},
    ),
    Case(
        "validation.sampling.samplesPerPrompt",
        {"validation": _VALIDATION, "validation.sampling": {"samplesPerPrompt": 2}},
        {"validation": _VALIDATION, "validation.sampling": {"samplesPerPrompt": 2, "temperature": "1"}},
    ),
    Case(
        "rewards.sum.terms",
        {"rewards": _sum_of({"name": "a", **_EXACT}, {"name": "a", **_EXACT})},
        {"rewards": _sum_of({"name": "a", **_EXACT}, {"name": "A", **_EXACT})},
        must="must have different names",
    ),
    Case(
        "rewards.sum.terms",
        {"rewards": _sum_of({"name": "a", "weight": "0", **_EXACT}, {"name": "b", "weight": "-0.0", **_EXACT})},
        {"rewards": _sum_of({"name": "a", "weight": "0", **_EXACT}, {"name": "b", "weight": "-0.5", **_EXACT})},
        must="must have a weight other than 0",
    ),
    Case(
        "rewards.sum.terms",
        {"rewards": _sum_of({"name": "a", "sources": ["main", "other"], **_EXACT})},
        {"rewards": _sum_of({"name": "a", "sources": ["main"], **_EXACT})},
        must="must be restricted to sources of prompts or validation",
    ),
    Case(
        "rewards.python.function",
        {"rewards": {"python": {"function": "my_rewards.grade"}}},
        {"rewards": {"python": {"function": "my.rewards:grade"}}},
    ),
    Case(
        "tools.answeredBy.python.function",
        {"tools": _TOOLS, "tools.answeredBy": {"python": {"function": "1:answer"}}},
        {"tools": _TOOLS, "tools.answeredBy": {"python": {"function": "_1:answer"}}},
    ),
    Case(
        "tools.callEnd",
        {"tools": _TOOLS, "tools.callStart": "<|call|>", "tools.callEnd": "|"},
        {"tools": _TOOLS, "tools.callStart": "<|call|>", "tools.callEnd": "/"},
        "must not be part of callStart",
    ),
    _tools("pool.timeoutS", 8, 9),
)

REDIS = (
    _redis("sentinel", _SENTINEL, ...),
    _at("telemetry.sinks.mlflow", {"trackingUri": "http://me:word@mlflow"}, {"trackingUri": "http://mlflow:5000"}),
    Case("store.redis.addresses", {"store": {"redis": {}}}, {"store": {"redis": _REDIS}}, "must be given"),
    _redis("addresses", ["redis:6379", "redis:65536"], ["redis:65535", "[fd00::1]:1"], "must each"),
    Case(
        "store.redis.sentinel.addresses",
        {"store": {"redis": {"sentinel": {**_SENTINEL, "addresses": []}}}},
        {"store": {"redis": {"sentinel": _SENTINEL}}},
    ),
    Case(
        "store.redis.username",
        {"store": {"redis": {**_REDIS, "username": {"environment": "WHO"}}}},
        {"store": {"redis": {**_REDIS, "username": {"environment": "WHO"}, "password": {"file": "/secret"}}}},
    ),
    _redis("tls", {"certFile": "/client.pem"}, {"certFile": "/client.pem", "keyFile": "/client.key"}),
    _redis("keyPrefix", "all*", "specrl:team/run"),
)

_HUB: dict[str, Any] = {"name": "openai/gsm8k", "config": "main"}


def _model_at(parent: str, section: str, field: str, refused: Changes, must: str) -> Case:
    """A rule of a section that names a model. refused: of the section's fields."""
    place = f"{parent}.{section}".removeprefix(".")
    more = {"coefficient": "1"} if section == "referenceKl" else {}
    return Case(f"{place}.{field}", {place: {**more, **refused}}, {place: {**more, "path": "/model"}}, must)


# In an RLJob the path must be absolute, so that a revision is never right there.
HUB = (
    Case("model.revision", {"model.revision": "main"}, {}),
    _model_at("generation.speculation", "eagle3", "revision", {"path": "/m", "revision": "main"}, "must not be given"),
    _model_at("generation.speculation", "eagle3", "revision", {"revision": "main"}, "must not be given"),
    _model_at(
        "generation.speculation", "draftModel", "revision", {"path": "/m", "revision": "main"}, "must not be given"
    ),
    _model_at("trainer.loss", "referenceKl", "revision", {"path": "/m", "revision": "main"}, "must not be given"),
    _model_at("", "model", "path", {"path": "/policy.gguf"}, "must not be a GGUF"),
    _model_at("generation.speculation", "eagle3", "path", {"path": "/head.gguf"}, "must not be a GGUF"),
    _model_at("generation.speculation", "draftModel", "path", {"path": "/small.gguf"}, "must not be a GGUF"),
    _model_at("trainer.loss", "referenceKl", "path", {"path": "/base.gguf"}, "must not be a GGUF"),
    Case(
        "prompts.source.dataset.files",
        {"prompts.source": {"dataset": {**_HUB, "files": ["/data/a.parquet", "b.parquet"]}}},
        {"prompts.source": {"dataset": {**_HUB, "files": ["/data/a.parquet", "/data/b.parquet"]}}},
        "must all be",
    ),
)

PATHS = (
    _at("model.path", "policy", "/policy"),
    _at("model.path", "Qwen/Qwen3-0.6B", "/policy"),
    Case(
        "prompts.source.dataset.files",
        {"prompts.source": {"dataset": _HUB}},
        {"prompts.source": {"dataset": {**_HUB, "files": ["/data/train.parquet"]}}},
        "must be absolute",
    ),
    _at("prompts.source", {"jsonl": {"path": "data/train.jsonl"}}, {"jsonl": {"path": "/train.jsonl"}}),
    _at("rewards", {"code": {"packages": "packages"}}, {"code": {"packages": "/packages"}}),
    _tools("answeredBy", {"code": {"packages": "./packages"}}, {"code": {"packages": "/packages"}}),
    _at("rewards", {"python": {"function": "a:b", "folder": ""}}, {"python": {"function": "a:b", "folder": "/"}}),
    _tools(
        "answeredBy",
        {"python": {"function": "a:b", "folder": "tools"}},
        {"python": {"function": "a:b", "folder": "/tools"}},
    ),
    _at("trainer.loss.referenceKl", {"coefficient": "1", "path": "base"}, {"coefficient": "1", "path": "/base"}),
    _at("generation.speculation", {"eagle3": {"path": "~/head"}}, {"eagle3": {"path": "/head"}}),
    _at("generation.speculation", {"draftModel": {"path": "small"}}, {"draftModel": {"path": "/small"}}),
    _redis("password", {"file": "secret"}, {"file": "/secret"}),
    *(
        _redis("tls", {**both, name: "it.pem"}, {**both, name: "/it.pem"})
        for both in ({"certFile": "/a", "keyFile": "/b"},)
        for name in ("caFile", "certFile", "keyFile")
    ),
)

STORAGE = (
    _at(
        "volumes",
        [{"claimName": "a", "mountPath": "/a"}, {"claimName": "b", "mountPath": "/a"}],
        [{"claimName": "a", "mountPath": "/a"}, {"claimName": "a", "mountPath": "/b"}],
    ),
    _at(
        "volumes",
        [{"claimName": "a", "mountPath": "/a"}, {"claimName": "a", "mountPath": "/var/lib/specrl/run"}],
        [{"claimName": "a", "mountPath": "/var/lib/specrl-models"}],
    ),
    _at("volumes", [{"claimName": "a", "mountPath": "a"}], [{"claimName": "a", "mountPath": "/a"}]),
    *(
        _at("volumes", [{"claimName": "a", "mountPath": path}], [{"claimName": "a", "mountPath": f"/data{path}"}])
        for path in ("/", "/etc", "/sys", "//dev/shm", "/opt/specrl", "/usr/lib/x")
    ),
    _at("volumes", [{"mountPath": "/a"}], [{"mountPath": "/a", "image": "models/qwen:1"}], "must be given without"),
    *(
        _at(
            "volumes",
            [{"mountPath": "/a", "image": "models/qwen:1", **other}],
            [{"mountPath": "/a", **other}],
            "must not be given with claimName or uri",
        )
        for other in ({"claimName": "a"}, {"uri": "s3://models/qwen"})
    ),
    _at(
        "volumes",
        [{"mountPath": "/a", "uri": "hf://Qwen/Qwen3-0.6B@main"}],
        [{"mountPath": "/a", "uri": "hf://Qwen/Qwen3-0.6B@main", "claimName": "a"}],
        "must end with @ and a commit",
    ),
    _at(
        "volumes",
        [{"mountPath": "/a", "uri": "hf://datasets/openai/gsm8k"}],
        [{"mountPath": "/a", "uri": f"hf://datasets/openai/gsm8k@{'0a' * 20}"}],
        "must end with @ and a commit",
    ),
    _at(
        "volumes",
        [{"mountPath": "/a", "claimName": "a", "secretName": "hub"}],
        [{"mountPath": "/a", "claimName": "a", "secretName": "hub", "uri": "gs://models/qwen"}],
        "must not be given without uri",
    ),
    Case(
        "checkpoint.claimName",
        {"checkpoint": {}},
        {"checkpoint": {}, "failurePolicy": {"onTrainerFailure": "Fail"}},
    ),
    Case(
        "cacheClaimName",
        {"cacheClaimName": "a", "volumes": [{"claimName": "a", "mountPath": "/a"}]},
        {"cacheClaimName": "runs", "volumes": [{"claimName": "a", "mountPath": "/a"}]},
    ),
    Case(
        "cacheClaimName",
        {"cacheClaimName": "a", "volumes": [{"claimName": "a", "mountPath": "/a", "uri": "s3://models/qwen"}]},
        {"cacheClaimName": "a", "volumes": [{"mountPath": "/a", "uri": "s3://models/qwen"}]},
    ),
    Case(
        "storeServer.podTemplate",
        {"storeServer.podTemplate": {}, "store": {"sqlite": {}}},
        {"storeServer.podTemplate": {}},
    ),
    Case(
        "store.sqlite",
        {"store": {"sqlite": {}}, "checkpoint": {}, "failurePolicy": {"onTrainerFailure": "Fail"}},
        {"store": {"sqlite": {}}},
    ),
    Case(
        "weights.transport",
        {"weights": {"transport": "Checkpoint"}, "checkpoint": {}, "failurePolicy": {"onTrainerFailure": "Fail"}},
        {"weights": {"transport": "Checkpoint"}},
        "must not be Checkpoint",
    ),
)

_TWO_DOMAINS = {
    "trainer.numNodes": 2,
    "trainer.parallelism": {"tensor": 4, "data": 2},
    "placement.layout": "SeparateDomains",
}
PLACEMENT = (
    _generic(
        "generation.gpusPerReplica",
        {"generation.gpusPerReplica": 1, "generation.tensorParallel": 2},
        {"generation.gpusPerReplica": 2, "generation.tensorParallel": 2},
        "must be 0 or",
    ),
    Case(
        "trainer.numNodes",
        {"trainer.numNodes": 2, "trainer.parallelism": {"data": 3}},
        {"trainer.numNodes": 2, "trainer.parallelism": {"data": 3, "tensor": 2}},
    ),
    _generic(
        "trainer.gpusPerNode",
        {"trainer.gpusPerNode": 4, "trainer.numNodes": 2, "trainer.parallelism": {"tensor": 4}},
        {"trainer.gpusPerNode": 4, "trainer.numNodes": 2, "trainer.parallelism": {"tensor": 4, "data": 2}},
        "must be 0 or",
    ),
    Case(
        "weights.transport",
        {"weights": {"transport": "Nccl"}},
        _GENERIC | {"weights": {"transport": "Nccl"}},
        "must not be Nccl",
    ),
    Case("placement.nvlink", {"placement.nvlink": "Preferred"}, _GB200 | {"placement.nvlink": "Preferred"}),
    *(
        _gb200(
            "placement.layout",
            {"placement.nvlink": "Required", "placement.layout": layout},
            {"placement.nvlink": "Required", "placement.layout": "SameDomain"},
            "must be SameDomain with nvlink Required",
        )
        for layout in ("Any", "SeparateDomains")
    ),
    *(
        case
        for path in ("trainer.gpusPerNode", "generation.gpusPerReplica")
        for case in (
            _gb200(path, {path: 0}, {}, "must be > 0"),
            _generic(path, {path: ...}, {}, "must be > 0"),
            Case(path, {path: 1}, {path: 0}, "must be 0 with"),
        )
    ),
    _generic(
        "trainer.gpusPerNode",
        {"trainer.gpusPerNode": 8, "trainer.parallelism": {"tensor": 8}, "placement.gpusPerNode": 4},
        {"trainer.gpusPerNode": 8, "trainer.parallelism": {"tensor": 8}},
        "must be <= placement",
    ),
    _generic(
        "generation.gpusPerReplica",
        {"generation.gpusPerReplica": 6, "generation.tensorParallel": 6, "placement.gpusPerNode": 4},
        {"generation.gpusPerReplica": 8, "generation.tensorParallel": 8, "placement.gpusPerNode": 4},
        "must be <= placement.gpusPerNode or",
    ),
    _generic(
        "generation.gpusPerReplica",
        {"generation.gpusPerReplica": 8, "generation.tensorParallel": 4, "placement.gpusPerNode": 4},
        {"generation.gpusPerReplica": 8, "generation.tensorParallel": 4},
        "must equal tensorParallel",
    ),
    _gb200(
        "trainer.gpusPerNode",
        {"placement.nvlink": "Preferred", "trainer.gpusPerNode": 2, "trainer.numNodes": 2},
        {"placement.nvlink": "Preferred"},
        "must equal placement",
    ),
    _gb200(
        "generation.gpusPerReplica",
        {"placement.nvlink": "Preferred", "generation.gpusPerReplica": 2, "generation.tensorParallel": 2},
        {"placement.nvlink": "Disabled", "generation.gpusPerReplica": 2, "generation.tensorParallel": 2},
        "must be >= placement",
    ),
    _gb200(
        "generation.gpusPerReplica",
        {"generation.gpusPerReplica": 76, "generation.tensorParallel": 76},
        {"generation.gpusPerReplica": 72, "generation.tensorParallel": 72},
        "must be <= placement.nodesPerDomain",
    ),
    _gb200("trainer.numNodes", {**_TWO_DOMAINS, "placement.nodesPerDomain": 1}, _TWO_DOMAINS),
    _gb200(
        "placement.layout",
        {"placement.layout": "SameDomain", "generation.replicas": 18},
        {"placement.layout": "SameDomain", "generation.replicas": 17},
    ),
)

SCALE = (
    _at("generation.autoscaling", {"minReplicas": 3, "maxReplicas": 2}, {"minReplicas": 2, "maxReplicas": 2}),
    Case(
        "failurePolicy.minGenerationReplicas",
        {"failurePolicy": {"minGenerationReplicas": 3}, "generation.replicas": 2},
        {"failurePolicy": {"minGenerationReplicas": 3}, "generation.replicas": 3},
        "must be <= generation.replicas",
    ),
    Case(
        "failurePolicy.minGenerationReplicas",
        {
            "failurePolicy": {"minGenerationReplicas": 2},
            "generation.replicas": 2,
            "generation.autoscaling": {"maxReplicas": 4},
        },
        {
            "failurePolicy": {"minGenerationReplicas": 2},
            "generation.replicas": 2,
            "generation.autoscaling": {"minReplicas": 2, "maxReplicas": 4},
        },
        "must be <= generation.autoscaling",
    ),
)

MODES = (
    Case(
        "scheduling.queueName",
        {"scheduling": {"gang": "Kueue"}},
        {"scheduling": {"gang": "Kueue", "queueName": "team"}},
        "must be given",
    ),
    Case(
        "scheduling.queueName",
        {"scheduling": {"gang": "None", "queueName": "team"}},
        {"scheduling": {"gang": "Auto", "queueName": "team"}},
        "must not be given",
    ),
    Case(
        "placement.rdma.count",
        {"placement.rdma": {"count": 4}},
        {"placement.rdma": {"count": 4, "resourceName": "rdma/ib"}},
    ),
    Case(
        "tls.issuer",
        {"tls": {"mode": "CertManager"}},
        {"tls": {"mode": "CertManager", "issuer": {"name": "ca"}}},
    ),
    Case(
        "tls.issuer",
        {"tls": {"issuer": {"name": "ca"}}},
        {"tls": {}},
    ),
    Case(
        "tls.secretName",
        {"tls": {"mode": "ExistingSecret"}},
        {"tls": {"mode": "ExistingSecret", "secretName": "peers"}},
    ),
)

CASES: tuple[Case, ...] = (*UNIONS, *DECIMALS, *RUN, *REDIS, *HUB, *PATHS, *STORAGE, *PLACEMENT, *SCALE, *MODES)

# Fields of a job, each with valid values; `...` means absent. Tests try every change from one value to another.
CHANGED_JOB: Changes = {
    "trainer.parallelism": {"data": 2},
    "failurePolicy": {"onTrainerFailure": "Fail"},
}
"""Changes of the job in which every value below is valid."""
_ON_GPUS: Changes = {**_GENERIC, "trainer.gpusPerNode": 2}
"""Further changes, for fields that only a job on GPUs may set."""

_TEMPLATES = ({"spec": {"hostIPC": True}}, {"spec": {"hostIPC": False}}, ...)
NEVER: dict[str, tuple[Any, ...]] = {
    "model": ({"path": "/a"}, {"path": "/b"}),
    "prompts": (SOUND["prompts"], {**SOUND["prompts"], "shuffleSeed": 1}),
    "rewards": ({"math": {}}, {"exact": {}}, {"math": {"answerAfter": "="}}),
    "rewardPool": ({}, {"workers": 2}),
    "tools": (_TOOLS, {**_TOOLS, "maxTurns": 3}, ...),
    "generation.sampling": ({"maxTokens": 64}, {"maxTokens": 65}, {"maxTokens": 64, "stop": ["end"]}),
    "generation.speculation": (..., {"ngram": {}}, {"suffix": {}}),
    "generation.draftLength": ("Adaptive", "Fixed"),
    "generation.maxLiveRollouts": (1, 2),
    "generation.drainS": (0, 1),
    "generation.reattachS": (0, 1),
    "generation.maxBatchedTokens": (256, 512, ...),
    "generation.kvCacheMib": (1, 2, ...),
    "generation.kvCacheDtype": ("Auto", "Fp8"),
    "generation.gpuMemoryUtilization": ("0.5", "0.6", ...),
    "generation.attentionBackend": ("FLASHINFER", ...),
    "generation.tensorParallel": (1, 2),
    "generation.expertParallel": (False, True),
    "generation.eager": (True, False, ...),
    "generation.threads": (1, 2),
    "generation.gpusPerReplica": (1, 2),
    "trainer.parallelism": ({"data": 2}, {"tensor": 2}),
    "trainer.optimizer": ({"learningRate": "1"}, {"learningRate": "2"}),
    "trainer.loss": ({}, {"advantages": "LeaveOneOut"}),
    "trainer.lora": (..., {"rank": 8}),
    "trainer.drafter": ({}, {"online": False}, {"tokenBudget": 1}),
    "trainer.microBatchTokens": (1024, 2048),
    "trainer.kernels": ("Reference", "Auto"),
    "trainer.recompute": ("Nothing", "Layers"),
    "trainer.routing": ("Anew", "Replay"),
    "trainer.threads": (1, 2),
    "trainer.numNodes": (1, 2),
    "schedule": (SOUND["schedule"], {**SOUND["schedule"], "steps": 4}),
    "weights": ({}, {"timeoutS": 121}),
    "canary": ({}, {"maxAbs": "1"}),
    "store": ({"sqlite": {}}, {"redis": _REDIS}, ...),
    "checkpoint": (
        {"claimName": "runs"},
        {"claimName": "others"},
        {"claimName": "runs", "from": {"claimName": "runs", "folder": "old-1a2b3c4d"}},
    ),
    "validation": (_VALIDATION, {**_VALIDATION, "limit": 5}, ...),
    "telemetry": ({}, {"logLevel": "debug"}),
    "managedBy": ("specrl.dev/operator", "kueue.x-k8s.io/multikueue", ...),
    "placement": tuple({"profile": "CPU", **more} for more in ({}, {"gpusPerNode": 8}, {"rdma": {}})),
    "tls": ({}, {"mode": "ExistingSecret", "secretName": "peers"}),
}
# A trainer's ranks fix the GPUs of its nodes, so that they cannot change alone.
ONE_NODE, TWO_NODES = (
    a_job({**_GENERIC, "trainer.parallelism": {"data": 2}, "trainer.numNodes": nodes, "trainer.gpusPerNode": gpus})
    for nodes, gpus in ((1, 2), (2, 1))
)
WHILE_SUSPENDED: dict[str, tuple[Any, ...]] = {
    "coordinator.podTemplate": _TEMPLATES,
    "generation.podTemplate": _TEMPLATES,
    "trainer.podTemplate": _TEMPLATES,
    "storeServer.podTemplate": _TEMPLATES,
    "volumes": ([], [{"claimName": "a", "mountPath": "/a"}], [{"claimName": "b", "mountPath": "/a"}]),
    "cacheClaimName": ("a", "b", ...),
    "scheduling": ({}, {"queueName": "a"}, {"priorityClassName": "high"}),
    "failurePolicy.maxRestarts": (0, 1),
    "failurePolicy.onTrainerFailure": ("Fail", "RestartFromCheckpoint"),
}
AT_ANY_TIME: dict[str, tuple[Any, ...]] = {
    "suspend": (False, True),
    "generation.replicas": (1, 4),
    "generation.autoscaling": ({"maxReplicas": 4}, {"maxReplicas": 5}, ...),
    "failurePolicy.minGenerationReplicas": (1, 2),
    "startupDeadlineSeconds": (1, 2, ...),
    "activeDeadlineSeconds": (1, 2, ...),
    "ttlSecondsAfterFinished": (0, 1, ...),
}


def changes_of(table: dict[str, tuple[Any, ...]]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """List every change from one value of a table to another: the field, the job before and the job after."""
    on_gpus = {**CHANGED_JOB, **_ON_GPUS}
    experts = {**on_gpus, "generation.gpusPerReplica": 2, "generation.tensorParallel": 2}
    bases = {
        "generation.gpusPerReplica": on_gpus,
        "generation.expertParallel": experts,
        "failurePolicy.minGenerationReplicas": {**CHANGED_JOB, "generation.replicas": 2},
    }
    return [
        (path, *(a_job({**bases.get(path, CHANGED_JOB), path: value}) for value in (before, after)))
        for path, values in table.items()
        for before in values
        for after in values
        if before is not after
    ]
