"""The rules of every run that no single field can state, here and on a cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from pydantic.alias_generators import to_camel

from specrl.spec.base import Section, Union
from specrl.spec.data import (
    Prompts,
    PromptSource,
    PythonVerifier,
    Rewards,
    SandboxLimits,
    ValidationSampling,
    WorkerLimits,
)
from specrl.spec.generation import Ngram, SamplingSpec, Speculation
from specrl.spec.rule import Rule
from specrl.spec.run import Canary, Checkpoint, RunSpec
from specrl.spec.sinks import Mlflow
from specrl.spec.store import RedisStore, Secret, Sentinel, Store, Tls
from specrl.spec.tools import AnsweredBy, PythonTool, Tools
from specrl.spec.trainer import (
    Advantages,
    Correction,
    CorrectionMethod,
    Decay,
    DrafterInitialisation,
    DrafterTraining,
    KlEstimator,
    KlPlace,
    Lora,
    Loss,
    Optimizer,
    Overlong,
    Parallelism,
    RatioTo,
    ReferenceKl,
    RolloutMask,
    WithoutSignal,
)

_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_ADDRESS = rf"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):{_PORT}$"
_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_FUNCTION = rf"^{_NAME}(\.{_NAME})*:{_NAME}$"
_KEY_PREFIX = "^[A-Za-z0-9:._/-]{1,200}$"


def _one_member(union: type[Union]) -> Rule:
    """A Kubernetes-style union has exactly one member set."""
    members = list(union.model_fields)
    names = [to_camel(name) for name in members]

    def got(section: Section) -> str | None:
        given = [to_camel(name) for name in members if getattr(section, name) is not None]
        return None if len(given) == 1 else ", ".join(given) or "none"

    given = ", ".join(f"has(self.{name})" for name in names)
    must = f"must have exactly one of {', '.join(names)}"
    return Rule(union, "", must, "keep the one you mean", got, f"[{given}].exists_one(given, given)")


_UNIONS: tuple[type[Union], ...] = (PromptSource, Rewards, Speculation, Store, Secret, AnsweredBy)
UNIONS = tuple(_one_member(union) for union in _UNIONS)


def _in_range(section: type[Section], fields: Sequence[str], bounds: str, remedy: str) -> list[Rule]:
    """Ranges of decimals, which the type itself does not bound; bounds are as in `>= 0 and < 1`."""
    limits = [(sign, Decimal(limit)) for sign, limit in re.findall(r"(>=?|<) ([0-9]+)", bounds)]
    holds = {">": Decimal.__gt__, ">=": Decimal.__ge__, "<": Decimal.__lt__}

    def rule(name: str) -> Rule:
        def got(holder: Section) -> str | None:
            value = getattr(holder, name)
            is_sound = value is None or all(holds[sign](value, limit) for sign, limit in limits)
            return None if is_sound else str(value)

        field = to_camel(name)
        cel = " && ".join(f"double(self.{field}) {sign} {limit}.0" for sign, limit in limits)
        if section.model_fields[name].default is None:
            cel = f"!has(self.{field}) || {cel}"
        return Rule(section, field, f"must be {bounds}", remedy, got, cel)

    return [rule(name) for name in fields]


_POSITIVE, _NOT_NEGATIVE = ("> 0", "give a positive decimal"), (">= 0", "give 0 or a positive decimal")
DECIMALS = (
    *_in_range(Optimizer, ["learning_rate", "epsilon", "clip_norm"], *_POSITIVE),
    *_in_range(Loss, ["clip_high", "clip_low"], *_POSITIVE),
    *_in_range(DrafterTraining, ["learning_rate", "clip_norm"], *_POSITIVE),
    *_in_range(Lora, ["alpha"], *_POSITIVE),
    *_in_range(Canary, ["max_mean_abs", "max_abs"], *_POSITIVE),
    *_in_range(Optimizer, ["beta1", "beta2"], ">= 0 and < 1", 'use "0.9" or "0.95"'),
    *_in_range(DrafterInitialisation, ["held_out"], ">= 0 and < 1", 'use "0.1"'),
    *_in_range(Optimizer, ["weight_decay"], *_NOT_NEGATIVE),
    *_in_range(Optimizer, ["final_learning_rate"], *_NOT_NEGATIVE),
    *_in_range(Correction, ["low"], *_NOT_NEGATIVE),
    *_in_range(Correction, ["high"], *_POSITIVE),
    *_in_range(RolloutMask, ["ratio_low", "ratio_high"], *_POSITIVE),
    *_in_range(RolloutMask, ["max_divergence"], *_NOT_NEGATIVE),
    *_in_range(ReferenceKl, ["coefficient"], *_POSITIVE),
    *_in_range(Overlong, ["penalty"], *_POSITIVE),
    *_in_range(ValidationSampling, ["temperature"], *_NOT_NEGATIVE),
)


# The trainer's importance ratio is over the whole softmax at the sampling temperature.
SAMPLING = (
    Rule(
        SamplingSpec,
        "temperature",
        "must be > 0",
        'use "1"; greedy rollouts of one prompt are all the same and teach nothing',
        lambda sampling: str(sampling.temperature) if sampling.temperature <= 0 else None,
        "double(self.temperature) > 0.0",
    ),
    Rule(
        SamplingSpec,
        "topP",
        "must be 1",
        'use "1"; a truncated distribution would bias the importance ratio',
        lambda sampling: str(sampling.top_p) if sampling.top_p != 1 else None,
        "double(self.topP) == 1.0",
    ),
    Rule(
        SamplingSpec,
        "topK",
        "must be 0",
        "use 0; a truncated distribution would bias the importance ratio",
        lambda sampling: str(sampling.top_k) if sampling.top_k != 0 else None,
        "self.topK == 0",
    ),
)

PARALLELISM = (
    Rule(
        Parallelism,
        "virtualStages",
        "must be 1 unless pipeline > 1",
        "give pipeline >= 2, or leave virtualStages out",
        lambda it: str(it.virtual_stages) if it.virtual_stages > 1 and it.pipeline == 1 else None,
        "self.virtualStages == 1 || self.pipeline > 1",
    ),
    Rule(
        Parallelism,
        "expert",
        "must divide tensor x context x data",
        "use a divisor, or raise data: expert parallel ranks are taken from these",
        lambda it: f"{it.expert} for {it.stage_size} ranks" if it.stage_size % it.expert else None,
        "self.tensor * self.context * self.data % self.expert == 0",
    ),
)


def _length_got(spec: RunSpec) -> str | None:
    draft = spec.generation.speculation.num_draft_tokens
    longest = spec.prompts.max_tokens + spec.generation.sampling.max_tokens + draft + 1
    return f"{spec.model.max_length} < {longest}" if spec.model.max_length < longest else None


def _pass_got(spec: RunSpec) -> str | None:
    room = spec.trainer.micro_batch_tokens * spec.trainer.parallelism.context
    longest = spec.prompts.max_tokens + spec.generation.sampling.max_tokens
    return f"{room} < {longest}" if room < longest else None


def _draft_tokens_in_cel() -> str:
    """`Speculation.num_draft_tokens`: that of the member that is given."""
    speculation, tokens = "self.generation.speculation", "0"
    for name, member in Speculation.model_fields.items():
        if name != "none":
            place = f"{speculation}.{member.alias}"
            tokens = f"has({place}) ? {place}.numDraftTokens : {tokens}"
    return f"({tokens})"


def _stop_got(spec: RunSpec) -> str | None:
    end = spec.tools.call_end if spec.tools is not None else None
    stops = [stop for stop in spec.generation.sampling.stop if end and stop and (stop in end or end in stop)]
    return f"{end!r} and stop {stops[0]!r}" if stops else None


def _output_got(spec: RunSpec) -> str | None:
    most = spec.generation.sampling.max_tokens
    is_sound = spec.tools is None or spec.tools.max_output_tokens < most
    return None if is_sound or spec.tools is None else f"{spec.tools.max_output_tokens} >= {most}"


def _slow_got(code: SandboxLimits | None, pool: WorkerLimits) -> str | None:
    """The sandbox says that a program is too slow, which is wrong or a tool's output; the pool, that nobody knows."""
    return f"{pool.timeout_s} <= {code.wall_s}" if code is not None and code.wall_s >= pool.timeout_s else None


def _milestone_got(checkpoint: Checkpoint) -> str | None:
    every, steps = checkpoint.milestone_every_steps, checkpoint.every_steps
    return f"{every} with everySteps={steps}" if every is not None and every % steps else None


def _function_rule(section: type[PythonVerifier], example: str) -> Rule:
    """A user's verifier or tool is named as entry points are."""
    return Rule(
        section,
        "function",
        "must be module:function",
        f"as in {example}",
        lambda python: None if re.fullmatch(_FUNCTION, python.function) else repr(python.function),
        f"self.__function__.matches({_literal(_FUNCTION)})",  # a word of CEL's; the API server knows it escaped
    )


def _literal(text: str) -> str:
    """A CEL string without escapes, for regular expressions."""
    assert "'" not in text
    return f"r'{text}'"


BETWEEN_SECTIONS = (
    Rule(
        RunSpec,
        "model.maxLength",
        "must be >= prompts.maxTokens + generation.sampling.maxTokens + draft tokens + 1",
        "raise it, or shorten prompts or completions",
        _length_got,
        f"self.prompts.maxTokens + self.generation.sampling.maxTokens + {_draft_tokens_in_cel()} + 1 "
        "<= self.model.maxLength",
    ),
    Rule(
        RunSpec,
        "trainer.microBatchTokens",
        "must be, times parallelism.context, >= prompts.maxTokens + generation.sampling.maxTokens",
        "raise it, share the rollouts out by trainer.parallelism.context, or shorten prompts or completions",
        _pass_got,
        "self.prompts.maxTokens + self.generation.sampling.maxTokens "
        "<= self.trainer.microBatchTokens * self.trainer.parallelism.context",
    ),
    Rule(
        RunSpec,
        "validation.source",
        "must differ from prompts.source",  # accuracy on trained problems measures memory
        "use a held-out file, or another seed of the generated family",
        lambda spec: "the same problems" if spec.validation and spec.validation.source == spec.prompts.source else None,
        "!has(self.validation) || dyn(self.validation.source) != dyn(self.prompts.source)",
    ),
    Rule(
        RunSpec,
        "rewardPool.timeoutS",
        "must be > rewards.code.wallS",
        "raise it, or lower wallS",
        lambda spec: _slow_got(spec.rewards.code, spec.reward_pool),
        "!has(self.rewards.code) || self.rewards.code.wallS < self.rewardPool.timeoutS",
    ),
    Rule(
        RunSpec,
        "tools.callEnd",
        "must not be part of a stop string or contain one",
        "take it out of generation.sampling.stop; it is one already",
        _stop_got,
        "!has(self.tools) || self.generation.sampling.stop.all(stop, stop == '' || "
        "!(stop.contains(self.tools.callEnd) || self.tools.callEnd.contains(stop)))",
    ),
    Rule(
        RunSpec,
        "tools.maxOutputTokens",
        "must be < generation.sampling.maxTokens",
        "lower it, or raise maxTokens, which counts outputs too",
        _output_got,
        "!has(self.tools) || self.tools.maxOutputTokens < self.generation.sampling.maxTokens",
    ),
)


WITHIN_SECTIONS = (
    Rule(
        Ngram,
        "lookupMin",
        "must be <= lookupMax",
        "swap the two",
        lambda ngram: f"{ngram.lookup_min} > {ngram.lookup_max}" if ngram.lookup_min > ngram.lookup_max else None,
        "self.lookupMin <= self.lookupMax",
    ),
    Rule(
        Prompts,
        "template",
        "must contain {question}",
        "write {question} where the problem's text belongs",
        lambda prompts: None if "{question}" in prompts.template else repr(prompts.template),
        "self.template.contains('{question}')",
    ),
    Rule(
        Checkpoint,
        "milestoneEverySteps",
        "must be a multiple of everySteps",  # other steps have no checkpoint that could be kept
        "use one, as 10 times everySteps",
        _milestone_got,
        "!has(self.milestoneEverySteps) || self.milestoneEverySteps % self.everySteps == 0",
    ),
    Rule(
        ValidationSampling,
        "samplesPerPrompt",
        "must be 1 at temperature 0",  # several greedy completions of one prompt are the same completion
        "raise the temperature or ask for one sample",
        lambda it: str(it.samples_per_prompt) if it.temperature == 0 and it.samples_per_prompt > 1 else None,
        "double(self.temperature) != 0.0 || self.samplesPerPrompt == 1",
    ),
    _function_rule(PythonVerifier, "my_rewards:grade"),
    _function_rule(PythonTool, "my_tools:answer"),
    Rule(
        Tools,
        "callEnd",
        "must not be part of callStart",
        "use an end that differs from the start, as </tool> and <tool>",
        lambda it: f"{it.call_end!r} in {it.call_start!r}" if it.call_end in it.call_start else None,
        "!self.callStart.contains(self.callEnd)",
    ),
    Rule(
        Tools,
        "pool.timeoutS",
        "must be > tools.answeredBy.code.wallS",
        "raise it, or lower wallS",
        lambda tools: _slow_got(tools.answered_by.code, tools.pool),
        "!has(self.answeredBy.code) || self.answeredBy.code.wallS < self.pool.timeoutS",
    ),
    Rule(
        Mlflow,
        "trackingUri",
        "must hold no user or password",
        "leave them to MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        lambda mlflow: "one with @" if mlflow.tracking_uri is not None and "@" in mlflow.tracking_uri else None,
        "!has(self.trackingUri) || !self.trackingUri.contains('@')",
    ),
)


def _bounds_got(low: Decimal | None, high: Decimal | None) -> str | None:
    return f"{low} > {high}" if low is not None and high is not None and low > high else None


def _rate_got(optimizer: Optimizer) -> str | None:
    final, peak = optimizer.final_learning_rate, optimizer.learning_rate
    return f"{final} > {peak}" if final > peak else None


def _overlong_got(spec: RunSpec) -> str | None:
    overlong, longest = spec.trainer.loss.overlong, spec.generation.sampling.max_tokens
    is_sound = overlong is None or overlong.buffer_tokens <= longest
    return None if is_sound or overlong is None else f"{overlong.buffer_tokens} > {longest}"


TRAINING = (
    Rule(
        Correction,
        "low",
        "must be <= high",
        "swap the two",
        lambda it: _bounds_got(it.low, it.high),
        "double(self.low) <= double(self.high)",
    ),
    Rule(
        RolloutMask,
        "ratioLow",
        "must be <= ratioHigh",
        "swap the two",
        lambda it: _bounds_got(it.ratio_low, it.ratio_high),
        "!has(self.ratioLow) || !has(self.ratioHigh) || double(self.ratioLow) <= double(self.ratioHigh)",
    ),
    Rule(
        Loss,
        "correction.method",
        "must be None where ratioTo is Sampler",
        "leave one of them out; the ratio to the sampler holds the weight already",
        lambda loss: (
            loss.correction.method.value
            if loss.ratio_to is RatioTo.SAMPLER and loss.correction.method is not CorrectionMethod.NONE
            else None
        ),
        "self.ratioTo != 'Sampler' || self.correction.method == 'None'",
    ),
    Rule(
        Loss,
        "withoutSignal",
        "must be Train where advantages is BatchStandardised",
        "keep them, since a group of equal rewards has advantages there; or centre on groups",
        lambda loss: (
            loss.without_signal.value
            if loss.advantages is Advantages.BATCH_STANDARDISED and loss.without_signal is WithoutSignal.LEAVE_OUT
            else None
        ),
        "self.advantages != 'BatchStandardised' || self.withoutSignal == 'Train'",
    ),
    Rule(
        ReferenceKl,
        "estimator",
        "must be K2 or K3 in the loss",
        "use K2, or place Reward; the gradient of K1 is 0 in expectation",
        lambda kl: "K1" if kl.estimator is KlEstimator.K1 and kl.place is KlPlace.LOSS else None,
        "self.place != 'Loss' || self.estimator != 'K1'",
    ),
    Rule(
        Optimizer,
        "finalLearningRate",
        "must be <= learningRate",
        "lower it; the rate falls towards it",
        _rate_got,
        "double(self.finalLearningRate) <= double(self.learningRate)",
    ),
    Rule(
        Optimizer,
        "decaySteps",
        "must stand with decay Linear or Cosine",
        "say how the learning rate falls, or leave decaySteps out",
        lambda it: "None" if it.decay_steps is not None and it.decay is Decay.NONE else None,
        "!has(self.decaySteps) || self.decay != 'None'",
    ),
    Rule(
        RunSpec,
        "trainer.loss.overlong.bufferTokens",
        "must be <= generation.sampling.maxTokens",
        "lower it; punishment begins so many tokens before the limit",
        _overlong_got,
        "!has(self.trainer.loss.overlong) || "
        "self.trainer.loss.overlong.bufferTokens <= self.generation.sampling.maxTokens",
    ),
)


def _addresses_got(holder: RedisStore | Sentinel) -> str | None:
    return ", ".join(repr(it) for it in holder.addresses if re.fullmatch(_ADDRESS, it) is None) or None


def _key_got(tls: Tls) -> str | None:
    is_sound = (tls.cert_file is None) == (tls.key_file is None)
    return None if is_sound else "certFile alone" if tls.key_file is None else "keyFile alone"


def _prefix_got(redis: RedisStore) -> str | None:
    prefix = redis.key_prefix
    return repr(prefix) if prefix is not None and re.fullmatch(_KEY_PREFIX, prefix) is None else None


_ADDRESSES_CEL = f"self.addresses.all(address, address.matches({_literal(_ADDRESS)}))"
_ADDRESSES_REMEDY = "write them as in redis-0.redis:6379; password and database are fields of their own"
REDIS = (
    Rule(
        RedisStore,
        "sentinel",
        "must stand instead of addresses",
        "name the servers, or the Sentinels that know them",
        lambda redis: "both" if redis.sentinel is not None and redis.addresses else None,
        "!has(self.sentinel) || self.addresses.size() == 0",
    ),
    Rule(
        RedisStore,
        "addresses",
        "must be given without sentinel",
        "name the servers, or the Sentinels that know them",
        lambda redis: "none" if redis.sentinel is None and not redis.addresses else None,
        "has(self.sentinel) || self.addresses.size() > 0",
    ),
    Rule(RedisStore, "addresses", "must each be HOST:PORT", _ADDRESSES_REMEDY, _addresses_got, _ADDRESSES_CEL),
    Rule(
        Sentinel,
        "addresses",
        "must each be HOST:PORT",
        _ADDRESSES_REMEDY,
        lambda sentinel: _addresses_got(sentinel) if sentinel.addresses else "none",
        f"self.addresses.size() > 0 && {_ADDRESSES_CEL}",
    ),
    Rule(
        RedisStore,
        "username",
        "must come with a password",
        "give password too, or leave username out",
        lambda redis: "none" if redis.username is not None and redis.password is None else None,
        "!has(self.username) || has(self.password)",
    ),
    Rule(
        Tls,
        "",
        "must have both certFile and keyFile or neither",
        "give both",
        _key_got,
        "has(self.certFile) == has(self.keyFile)",
    ),
    Rule(
        RedisStore,
        "keyPrefix",
        "must be 1 to 200 letters, digits and :._/-",
        "use one such as specrl:team:run",
        _prefix_got,
        f"!has(self.keyPrefix) || self.keyPrefix.matches({_literal(_KEY_PREFIX)})",
    ),
)


RULES: tuple[Rule, ...] = (
    *UNIONS,
    *SAMPLING,
    *PARALLELISM,
    *BETWEEN_SECTIONS,
    *DECIMALS,
    *WITHIN_SECTIONS,
    *TRAINING,
    *REDIS,
)
