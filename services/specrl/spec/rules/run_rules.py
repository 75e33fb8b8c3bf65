"""Cross-field rules of every run, local or on a cluster.

The form of a rule is in `rule.py`. `load.py` and `rljob/crd.py` read RULES.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from pydantic.alias_generators import to_camel

from specrl.spec import store, trainer
from specrl.spec.base import HUB_NAME_PATTERN, Section, UnionSection, is_hub_name, is_optional
from specrl.spec.data import (
    CodeVerifier,
    HubSource,
    PromptFormat,
    Prompts,
    PromptSource,
    PythonVerifier,
    Rewards,
    RewardSum,
    TrainingSource,
    Validation,
    ValidationSampling,
    VerifierSection,
)
from specrl.spec.generation import DraftModel, Eagle3, Generation, Ngram, SamplingSpec, Speculation
from specrl.spec.rules.rule import Rule, compare_fields
from specrl.spec.run import Canary, Checkpoint, Model, RunSpec
from specrl.spec.sinks import Mlflow
from specrl.spec.tools import AnsweredBy, PythonTool, Tools
from specrl.spec.trainer import (
    Advantages,
    CorrectionMethod,
    Decay,
    KlEstimator,
    KlPlace,
    OptimizerKind,
    RatioTo,
    WithoutSignal,
)

# Patterns are used by Python's re and by CEL, which has RE2's syntax.
# 1 to 65535, without leading zeros.
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
# A host name or an IPv4 address, or an IPv6 address in brackets.
_ADDRESS = rf"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):{_PORT}$"
_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_FUNCTION = rf"^{_NAME}(\.{_NAME})*:{_NAME}$"
_KEY_PREFIX = "^[A-Za-z0-9:._/-]{1,200}$"


def _require_one_member(union: type[UnionSection]) -> Rule[UnionSection]:
    """Build the rule that a Kubernetes-style union has exactly one member set."""
    names = [to_camel(name) for name in union.model_fields]
    given = ", ".join(f"has(self.{name})" for name in names)

    def list_given(section: UnionSection) -> list[str]:
        return [to_camel(name) for name in union.model_fields if getattr(section, name) is not None]

    return Rule(
        union,
        "",
        f"must have exactly one of {', '.join(names)}",
        "give one, and remove the others",
        lambda section: len(list_given(section)) == 1,
        # CEL cannot count; exists_one over a list of booleans holds if exactly one of them is true.
        f"[{given}].exists_one(given, given)",
        lambda section: ", ".join(list_given(section)) or "none",
    )


def _require_sources(section: type[Prompts] | type[Validation]) -> Rule[Any]:
    """Build the rule that a section has one source or a list of several."""
    return Rule(
        section,
        "source",
        "must be given, or sources instead of it",
        "give one of the two",
        lambda it: (it.source is None) != (not it.sources),
        "has(self.source) != (self.sources.size() > 0)",
        lambda it: "none" if it.source is None else "both",
    )


# `load.read_spec` checks these rules alone, before its callers read the member that is set.
_UNIONS: tuple[type[UnionSection], ...] = (
    PromptSource,
    Rewards,
    VerifierSection,
    Speculation,
    store.Store,
    store.Secret,
    AnsweredBy,
)
UNIONS = (
    *(_require_one_member(union) for union in _UNIONS),
    _require_sources(Prompts),
    _require_sources(Validation),
)


def _require_range(section: type[Section], fields: Sequence[str], bounds: str, remedy: str) -> list[Rule[Section]]:
    """Build range rules of decimal fields, whose type has no bounds. bounds: as in `>= 0 and < 1`."""
    limits = [(sign, Decimal(limit)) for sign, limit in re.findall(r"(>=?|<) ([0-9]+)", bounds)]
    compare = {">": Decimal.__gt__, ">=": Decimal.__ge__, "<": Decimal.__lt__}

    def build_rule(name: str) -> Rule[Section]:
        def holds(holder: Section) -> bool:
            value = getattr(holder, name)
            return value is None or all(compare[sign](value, limit) for sign, limit in limits)

        field = to_camel(name)
        # Decimals are strings in the CRD. CEL compares them as doubles.
        cel = " && ".join(f"double(self.{field}) {sign} {limit}.0" for sign, limit in limits)
        guard = f"!has(self.{field}) || " if is_optional(section.model_fields[name]) else ""
        return Rule(section, field, f"must be {bounds}", remedy, holds, guard + cel)

    return [build_rule(name) for name in fields]


_POSITIVE = ("> 0", "give a positive decimal")
_NOT_NEGATIVE = (">= 0", "give 0 or a positive decimal")
_LOWER_MEMORY = "lower it, or raise the pool's"

# vLLM's limits. It raises lower temperatures to the first without an error.
_LOWEST_TEMPERATURE = Decimal("0.01")
_HIGHEST_TEMPERATURE = Decimal(2)
DECIMALS: tuple[Rule[Any], ...] = (
    *_require_range(trainer.Optimizer, ["learning_rate", "epsilon", "clip_norm"], *_POSITIVE),
    *_require_range(trainer.Muon, ["learning_rate"], *_POSITIVE),
    *_require_range(trainer.Muon, ["momentum"], ">= 0 and < 1", 'use "0.95"'),
    *_require_range(trainer.Loss, ["clip_high", "clip_low"], *_POSITIVE),
    *_require_range(trainer.DrafterTraining, ["learning_rate", "clip_norm"], *_POSITIVE),
    *_require_range(trainer.Lora, ["alpha"], *_POSITIVE),
    *_require_range(Canary, ["max_mean_abs", "max_abs"], *_POSITIVE),
    *_require_range(trainer.Optimizer, ["beta1", "beta2"], ">= 0 and < 1", 'use "0.9" or "0.95"'),
    *_require_range(trainer.DrafterInitialisation, ["held_out"], ">= 0 and < 1", 'use "0.1"'),
    *_require_range(trainer.DrafterInitialisation, ["min_gain"], *_NOT_NEGATIVE),
    *_require_range(trainer.Optimizer, ["weight_decay"], *_NOT_NEGATIVE),
    *_require_range(trainer.Optimizer, ["final_learning_rate"], *_NOT_NEGATIVE),
    *_require_range(trainer.Correction, ["low"], *_NOT_NEGATIVE),
    *_require_range(trainer.Correction, ["high"], *_POSITIVE),
    *_require_range(trainer.RolloutMask, ["ratio_low", "ratio_high"], *_POSITIVE),
    *_require_range(trainer.RolloutMask, ["max_divergence"], *_NOT_NEGATIVE),
    *_require_range(trainer.ReferenceKl, ["coefficient"], *_POSITIVE),
    *_require_range(trainer.Overlong, ["penalty"], *_POSITIVE),
    Rule(
        ValidationSampling,
        "temperature",
        "must be 0, or >= 0.01 and <= 2",
        'use "0" for greedy completions; vLLM raises smaller values to 0.01, and refuses larger ones than 2',
        lambda it: it.temperature == 0 or _LOWEST_TEMPERATURE <= it.temperature <= _HIGHEST_TEMPERATURE,
        "double(self.temperature) == 0.0 || (double(self.temperature) >= 0.01 && double(self.temperature) <= 2.0)",
    ),
)

ENGINE = (
    Rule(
        Generation,
        "gpuMemoryUtilization",
        "must be > 0 and <= 1",
        'use "0.92" for a GPU of its own',
        lambda it: it.gpu_memory_utilization is None or 0 < it.gpu_memory_utilization <= 1,
        "!has(self.gpuMemoryUtilization) || double(self.gpuMemoryUtilization) > 0.0 && "
        "double(self.gpuMemoryUtilization) <= 1.0",
    ),
    Rule(
        Generation,
        "kvCacheMib",
        "must not be given beside gpuMemoryUtilization",
        "give one of the two: the cache's own size, or a share of the GPU for weights, activations and cache",
        lambda it: it.kv_cache_mib is None or it.gpu_memory_utilization is None,
        "!has(self.kvCacheMib) || !has(self.gpuMemoryUtilization)",
    ),
    Rule(
        Generation,
        "expertParallel",
        "must be false unless tensorParallel is above 1",
        "raise tensorParallel: experts are dealt out to its GPUs",
        lambda it: not it.expert_parallel or it.tensor_parallel > 1,
        "!self.expertParallel || self.tensorParallel > 1",
    ),
)


# The trainer computes log-probabilities of the distribution that was sampled from: at its temperature, and over the
# tokens that top-p and top-k left.
SAMPLING = (
    Rule(
        SamplingSpec,
        "temperature",
        "must be >= 0.01 and <= 2",
        'use "1"; vLLM refuses more than 2, and greedy rollouts of one prompt are all equal, so all advantages are 0',
        lambda it: _LOWEST_TEMPERATURE <= it.temperature <= _HIGHEST_TEMPERATURE,
        "double(self.temperature) >= 0.01 && double(self.temperature) <= 2.0",
    ),
    Rule(
        SamplingSpec,
        "topP",
        "must be > 0 and <= 1",
        'use "1" for the whole distribution, or a share of it such as "0.95"',
        lambda it: 0 < it.top_p <= 1,
        "double(self.topP) > 0.0 && double(self.topP) <= 1.0",
    ),
    Rule(
        SamplingSpec,
        "topK",
        "must be 0 or >= 2",
        "use 0 for the whole vocabulary; with one token left, its renormalised probability is always 1, so that "
        "nothing is learned",
        lambda it: it.top_k != 1,
        "self.topK != 1",
    ),
)

DRAFTER = (
    Rule(
        trainer.DrafterInitialisation,
        "maxPrompts",
        "must be >= prompts",
        "raise it, or lower prompts; equal numbers keep the number of prompts as it is",
        lambda it: it.max_prompts is None or it.max_prompts >= it.prompts,
        "!has(self.maxPrompts) || self.maxPrompts >= self.prompts",
        lambda it: f"{it.max_prompts} < {it.prompts}",
    ),
)

PARALLELISM = (
    Rule(
        trainer.Parallelism,
        "virtualStages",
        "must be 1 unless pipeline > 1",
        "set pipeline to 2 or more, or leave virtualStages out",
        lambda it: it.virtual_stages == 1 or it.pipeline > 1,
        "self.virtualStages == 1 || self.pipeline > 1",
    ),
    Rule(
        trainer.Parallelism,
        "expert",
        "must divide tensor x context x data",
        "use a divisor, or raise data; expert parallel groups consist of these ranks",
        lambda it: it.stage_size % it.expert == 0,
        "self.tensor * self.context * self.data % self.expert == 0",
        lambda it: f"{it.expert} for {it.stage_size} ranks",
    ),
)


def _count_rollout_tokens(spec: RunSpec) -> int:
    """Return the tokens of the longest prompt and completion."""
    return spec.prompts.max_tokens + spec.generation.sampling.max_tokens


def _count_engine_tokens(spec: RunSpec) -> int:
    """Return the tokens of the longest sequence that an engine computes: a rollout, a draft and the token after it."""
    return _count_rollout_tokens(spec) + spec.generation.speculation.num_draft_tokens + 1


def _count_pass_tokens(spec: RunSpec) -> int:
    """Return the most tokens of a rollout in a pass. It is split only by context parallelism, never over passes."""
    return spec.trainer.micro_batch_tokens * spec.trainer.parallelism.context


def _list_long_validations(spec: RunSpec) -> list[str]:
    """List the validation sources whose completions do not fit into model.maxLength, with their tokens."""
    rest = _count_engine_tokens(spec) - spec.generation.sampling.max_tokens
    sets = spec.validation.all_sets if spec.validation is not None else ()
    lengths = {it.name: it.sampling.max_tokens or 0 for it in sets}
    return [f"{length + rest} for {name}" for name, length in lengths.items() if length + rest > spec.model.max_length]


def _write_draft_tokens_cel() -> str:
    """Build the CEL form of `Speculation.num_draft_tokens`."""
    speculation = "self.generation.speculation"
    # A chain of conditionals, since CEL cannot iterate over members. All members but `none` have numDraftTokens.
    tokens = "0"
    for name, member in Speculation.model_fields.items():
        if name != "none":
            place = f"{speculation}.{member.alias}"
            tokens = f"has({place}) ? {place}.numDraftTokens : {tokens}"
    return f"({tokens})"


def _list_stop_overlaps(spec: RunSpec) -> list[str]:
    # If one contains the other, the engine would stop at the wrong one, and the call's end would be missed.
    end = spec.tools.call_end if spec.tools is not None else ""
    stops = [stop for stop in spec.generation.sampling.stop if end and (stop in end or end in stop)]
    return [f"{end!r} and stop {stop!r}" for stop in stops]


def _list_code_terms(spec: RunSpec) -> list[CodeVerifier]:
    """List the verifiers `code` in a sum."""
    terms = spec.rewards.sum.terms if spec.rewards.sum is not None else ()
    return [term.verifier.code for term in terms if term.verifier.code is not None]


def _find_longest_wall_s(spec: RunSpec) -> int:
    """Return the longest wallS of the verifiers `code` in a sum; 0 without any."""
    return max((code.wall_s for code in _list_code_terms(spec)), default=0)


def _find_largest_memory_mib(spec: RunSpec) -> int:
    """Return the largest memoryMib of the verifiers `code` in a sum; 0 without any."""
    return max((code.memory_mib for code in _list_code_terms(spec)), default=0)


def _list_unknown_sources(spec: RunSpec) -> list[str]:
    """List the sources that rewards are restricted to, and that neither prompts nor validation have."""
    known = {source.name for source in spec.prompts.all_sources}
    if spec.validation is not None:
        known |= {part.name for part in spec.validation.all_sets}
    terms = spec.rewards.sum.terms if spec.rewards.sum is not None else ()
    return [name for term in terms for name in term.sources if name not in known]


_KNOWN_SOURCE_CEL = (
    "name == 'main' && (has(self.prompts.source) || has(self.validation) && has(self.validation.source)) || "
    "self.prompts.sources.exists(source, source.name == name) || "
    "has(self.validation) && self.validation.sources.exists(source, source.name == name)"
)


def _list_repeated_rewards(rewards: RewardSum) -> str:
    names = [term.name for term in rewards.terms]
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def _require_function_name(section: type[PythonVerifier], example: str) -> Rule[PythonVerifier]:
    """Build the rule that a user's verifier or tool is named as entry points are."""
    return Rule(
        section,
        "function",
        "must be module:function",
        f"as in {example}",
        lambda python: re.fullmatch(_FUNCTION, python.function) is not None,
        # `function` is a reserved word of CEL. Kubernetes escapes such field names with underscores.
        f"self.__function__.matches({_quote_cel(_FUNCTION)})",
        advise=_advise_function_name,
    )


def _advise_function_name(python: PythonVerifier) -> str:
    """Say what to write instead of a file: `rewards/mine.py:grade`, `mine.py` or `mine.py.grade`.

    `mine.py:grade` could be a module of a package, so it is refused where it is imported.
    """
    file = re.fullmatch(rf"(.*/)?({_NAME})\.py(?:[:.]+({_NAME}))?", python.function)
    if file is None:
        return ""
    folder, module, function = file.groups()
    place = f", with folder: {folder.rstrip('/') or '/'}" if folder and python.folder is None else ""
    return f"write {module}:{function or 'FUNCTION'}{place}"


def _quote_cel(text: str) -> str:
    """Quote a regular expression as a raw string of CEL."""
    assert "'" not in text
    return f"r'{text}'"


_VALIDATION_FITS = (
    "!has(it.maxTokens) || "
    f"self.prompts.maxTokens + it.maxTokens + {_write_draft_tokens_cel()} + 1 <= self.model.maxLength"
)
"""CEL of whether a ValidationSampling `it` fits into the policy's context."""

# Rules between sections: lengths that must fit into each other, and stop strings that must not collide.
BETWEEN_SECTIONS = (
    Rule(
        RunSpec,
        "generation.maxBatchedTokens",
        "must be >= maxLiveRollouts x (numDraftTokens + 1)",
        "raise it, or leave it out, or lower maxLiveRollouts or numDraftTokens: a step with all rollouts must fit",
        lambda spec: (spec.generation.max_batched_tokens or math.inf) >= spec.generation.full_step_tokens,
        "!has(self.generation.maxBatchedTokens) || self.generation.maxLiveRollouts * "
        f"({_write_draft_tokens_cel()} + 1) <= self.generation.maxBatchedTokens",
        lambda spec: f"{spec.generation.max_batched_tokens} < {spec.generation.full_step_tokens}",
    ),
    Rule(
        RunSpec,
        "checkpoint.keepBest",
        "must be false without a validation",  # it says which checkpoint is the best
        "add a validation",
        lambda spec: not spec.checkpoint.keep_best or spec.validation is not None,
        "!self.checkpoint.keepBest || has(self.validation)",
    ),
    Rule(
        RunSpec,
        "model.maxLength",
        "must be >= prompts.maxTokens + generation.sampling.maxTokens + draft tokens + 1",
        "raise it, or shorten prompts or completions",
        lambda spec: spec.model.max_length >= _count_engine_tokens(spec),
        f"self.prompts.maxTokens + self.generation.sampling.maxTokens + {_write_draft_tokens_cel()} + 1 "
        "<= self.model.maxLength",
        lambda spec: f"{spec.model.max_length} < {_count_engine_tokens(spec)}",
    ),
    Rule(
        RunSpec,
        "validation",
        "must have sampling.maxTokens so that it, prompts.maxTokens and draft tokens + 1 fit into model.maxLength",
        "lower it, or raise model.maxLength",
        lambda spec: not _list_long_validations(spec),
        # The section's own sampling counts only if a source is sampled with it, as in Validation.all_sets.
        "!has(self.validation) || "
        "(!has(self.validation.source) && self.validation.sources.all(source, has(source.sampling)) || "
        f"[self.validation.sampling].all(it, {_VALIDATION_FITS})) && (has(self.validation.source) || "
        f"self.validation.sources.all(source, !has(source.sampling) || [source.sampling].all(it, {_VALIDATION_FITS})))",
        lambda spec: f"{', '.join(_list_long_validations(spec))} > {spec.model.max_length}",
    ),
    Rule(
        RunSpec,
        "trainer.microBatchTokens",
        "must be, times parallelism.context, >= prompts.maxTokens + generation.sampling.maxTokens",
        "raise it, share the rollouts out by trainer.parallelism.context, or shorten prompts or completions",
        lambda spec: _count_pass_tokens(spec) >= _count_rollout_tokens(spec),
        "self.prompts.maxTokens + self.generation.sampling.maxTokens "
        "<= self.trainer.microBatchTokens * self.trainer.parallelism.context",
        lambda spec: f"{_count_pass_tokens(spec)} < {_count_rollout_tokens(spec)}",
    ),
    Rule(
        RunSpec,
        "validation.source",
        "must differ from prompts.source",  # accuracy on problems that were trained on measures memorization
        "use a held-out file, or another seed of the generated family",
        # Of lists this is not checked here: problems that both have are found when the data are read.
        lambda spec: (
            spec.validation is None or spec.validation.source is None or spec.validation.source != spec.prompts.source
        ),
        # dyn: to CEL the two sources have different object types, which it refuses to compare.
        "!has(self.validation) || !has(self.validation.source) || !has(self.prompts.source) || "
        "dyn(self.validation.source) != dyn(self.prompts.source)",
        lambda spec: "the same problems",
    ),
    # Otherwise the pool would kill its worker before the sandbox can report that the answer exceeded its own limit.
    compare_fields(RunSpec, "rewardPool.timeoutS", ">", "rewards.code.wallS", "raise it, or lower wallS"),
    Rule(
        RunSpec,
        "rewardPool.timeoutS",
        "must be > wallS of every verifier code in rewards.sum.terms",
        "raise it, or lower wallS",
        lambda spec: spec.reward_pool.timeout_s > _find_longest_wall_s(spec),
        "!has(self.rewards.sum) || self.rewards.sum.terms.all(term, !has(term.verifier.code) || "
        "self.rewardPool.timeoutS > term.verifier.code.wallS)",
        lambda spec: f"{spec.reward_pool.timeout_s} <= {_find_longest_wall_s(spec)}",
    ),
    # A program's process is a child of the pool's worker, whose limit it cannot raise.
    compare_fields(RunSpec, "rewards.code.memoryMib", "<=", "rewardPool.memoryMib", _LOWER_MEMORY),
    Rule(
        RunSpec,
        "rewardPool.memoryMib",
        "must be >= memoryMib of every verifier code in rewards.sum.terms",
        "raise it, or lower the verifier's",
        lambda spec: spec.reward_pool.memory_mib >= _find_largest_memory_mib(spec),
        "!has(self.rewards.sum) || self.rewards.sum.terms.all(term, !has(term.verifier.code) || "
        "self.rewardPool.memoryMib >= term.verifier.code.memoryMib)",
        lambda spec: f"{spec.reward_pool.memory_mib} < {_find_largest_memory_mib(spec)}",
    ),
    Rule(
        RunSpec,
        "rewards.sum.terms",
        "must be restricted to sources of prompts or validation",
        "correct the name, or leave the reward's sources out, so that it applies to all",
        lambda spec: not _list_unknown_sources(spec),
        f"!has(self.rewards.sum) || self.rewards.sum.terms.all(term, term.sources.all(name, {_KNOWN_SOURCE_CEL}))",
        lambda spec: ", ".join(_list_unknown_sources(spec)),
    ),
    Rule(
        RunSpec,
        "tools.callEnd",
        "must not be part of a stop string or contain one",
        "remove the string from generation.sampling.stop; callEnd is a stop string already",
        lambda spec: not _list_stop_overlaps(spec),
        "!has(self.tools) || self.generation.sampling.stop.all(stop, "
        "!(stop.contains(self.tools.callEnd) || self.tools.callEnd.contains(stop)))",
        lambda spec: _list_stop_overlaps(spec)[0],
    ),
    compare_fields(
        RunSpec,
        "tools.maxOutputTokens",
        "<",
        "generation.sampling.maxTokens",
        "lower it, or raise maxTokens, which includes the outputs of tools",
    ),
)


def _list_repeated_names(section: Prompts | Validation) -> list[str]:
    names = [source.name for source in section.sources]
    return sorted({name for name in names if names.count(name) > 1})


def _require_own_names(section: type[Prompts] | type[Validation]) -> Rule[Any]:
    """Build the rule that no two sources of a list have one name."""
    return Rule(
        section,
        "sources",
        "must each have a name of its own",
        "give one of them another name",
        lambda it: not _list_repeated_names(it),
        "self.sources.all(it, self.sources.exists_one(other, other.name == it.name))",
        lambda it: ", ".join(_list_repeated_names(it)),
    )


def _list_chat_fields(prompts: Prompts) -> list[str]:
    """List the fields with messages that a raw prompt has no place for."""
    found = [f"sources.{number}" for number, it in enumerate(prompts.sources) if it.system is not None or it.few_shot]
    return [*(["system"] if prompts.system is not None else []), *(["fewShot"] if prompts.few_shot else []), *found]


# Rules about sources and what the policy is asked.
PROMPTS = (
    _require_own_names(Prompts),
    _require_own_names(Validation),
    Rule(
        Prompts,
        "template",
        "must contain {question}",
        "write {question} where the problem's text belongs",
        lambda prompts: "{question}" in prompts.template,
        "self.template.contains('{question}')",
    ),
    Rule(
        TrainingSource,
        "template",
        "must contain {question}",
        "write {question} where the problem's text belongs",
        lambda it: it.template is None or "{question}" in it.template,
        "!has(self.template) || self.template.contains('{question}')",
    ),
    Rule(
        Prompts,
        "format",
        "must be Chat with system or fewShot",
        "use Chat, or write these texts into the template",
        lambda it: it.format is PromptFormat.CHAT or not _list_chat_fields(it),
        "self.format == 'Chat' || (!has(self.system) && self.fewShot.size() == 0 && "
        "self.sources.all(it, !has(it.system) && it.fewShot.size() == 0))",
        lambda it: f"Raw with {', '.join(_list_chat_fields(it))}",
    ),
)


WITHIN_SECTIONS = (
    compare_fields(Ngram, "lookupMin", "<=", "lookupMax", "swap the two"),
    Rule(
        Checkpoint,
        "milestoneEverySteps",
        "must be a multiple of everySteps",  # other steps have no checkpoint
        "use a multiple, such as 10 times everySteps",
        lambda it: it.milestone_every_steps is None or it.milestone_every_steps % it.every_steps == 0,
        "!has(self.milestoneEverySteps) || self.milestoneEverySteps % self.everySteps == 0",
        lambda it: f"{it.milestone_every_steps} with everySteps={it.every_steps}",
    ),
    Rule(
        ValidationSampling,
        "samplesPerPrompt",
        "must be 1 at temperature 0",  # several greedy completions of one prompt are the same completion
        "raise the temperature or ask for one sample",
        lambda it: it.temperature != 0 or it.samples_per_prompt == 1,
        "double(self.temperature) != 0.0 || self.samplesPerPrompt == 1",
    ),
    _require_function_name(PythonVerifier, "my_rewards:grade"),
    Rule(
        RewardSum,
        "terms",
        "must have different names",
        "rename one",
        lambda it: not _list_repeated_rewards(it),
        "self.terms.all(term, self.terms.exists_one(other, other.name == term.name))",
        _list_repeated_rewards,
    ),
    Rule(
        RewardSum,
        "terms",
        "must have a weight other than 0",  # with weights of 0 alone, no group would have a signal
        "give a reward a weight; those with weight 0 are only reported",
        lambda it: any(term.weight != 0 for term in it.terms),
        "self.terms.exists(term, double(term.weight) != 0.0)",
        lambda it: "weights of 0 alone",
    ),
    _require_function_name(PythonTool, "my_tools:answer"),
    Rule(
        Tools,
        "callEnd",
        "must not be part of callStart",
        "use texts of which neither contains the other, such as <tool> and </tool>",
        lambda it: it.call_end not in it.call_start,
        "!self.callStart.contains(self.callEnd)",
        lambda it: f"{it.call_end!r} in {it.call_start!r}",
    ),
    # As for rewardPool.timeoutS and memoryMib.
    compare_fields(RunSpec, "tools.pool.timeoutS", ">", "tools.answeredBy.code.wallS", "raise it, or lower wallS"),
    compare_fields(RunSpec, "tools.answeredBy.code.memoryMib", "<=", "tools.pool.memoryMib", _LOWER_MEMORY),
    Rule(
        Mlflow,
        "trackingUri",
        "must contain no user or password",  # the run file and the RLJob are not secret
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the coordinator's environment instead",
        lambda mlflow: mlflow.tracking_uri is None or "@" not in mlflow.tracking_uri,
        "!has(self.trackingUri) || !self.trackingUri.contains('@')",
        lambda mlflow: "a URL with @",  # the message must not contain the password
    ),
)


# Rules about combinations of loss and optimizer settings.
TRAINING = (
    compare_fields(trainer.Correction, "low", "<=", "high", "swap the two"),
    compare_fields(trainer.RolloutMask, "ratioLow", "<=", "ratioHigh", "swap the two"),
    Rule(
        trainer.Loss,
        "correction.method",
        "must be None if ratioTo is Sampler",
        "set correction: {method: None}, or leave ratioTo out; the ratio to the sampler contains the importance weight "
        "already",
        lambda it: it.ratio_to is not RatioTo.SAMPLER or it.correction.method is CorrectionMethod.NONE,
        "self.ratioTo != 'Sampler' || self.correction.method == 'None'",
    ),
    Rule(
        trainer.Loss,
        "withoutSignal",
        "must be Train if advantages is BatchStandardised",
        "use Train, since groups of equal rewards have advantages there; or centre advantages on groups",
        lambda it: it.advantages is not Advantages.BATCH_STANDARDISED or it.without_signal is WithoutSignal.TRAIN,
        "self.advantages != 'BatchStandardised' || self.withoutSignal == 'Train'",
    ),
    Rule(
        trainer.ReferenceKl,
        "estimator",
        "must be K2 or K3 in the loss",
        "use K2, or place Reward; the gradient of K1 is 0 in expectation",
        lambda it: it.place is not KlPlace.LOSS or it.estimator is not KlEstimator.K1,
        "self.place != 'Loss' || self.estimator != 'K1'",
    ),
    Rule(
        trainer.Optimizer,
        "kind",
        "must be Muon with muon",
        "set kind: Muon, or leave muon out",
        lambda it: it.muon is None or it.kind is OptimizerKind.MUON,
        "!has(self.muon) || self.kind == 'Muon'",
    ),
    Rule(
        trainer.Trainer,
        "optimizer.kind",
        "must be AdamW with lora",
        "use AdamW, or leave lora out; to orthogonalise the two factors is not to orthogonalise their product's update",
        lambda it: it.lora is None or it.optimizer.kind is OptimizerKind.ADAMW,
        "!has(self.lora) || self.optimizer.kind != 'Muon'",
    ),
    compare_fields(
        trainer.Optimizer, "finalLearningRate", "<=", "learningRate", "lower it; the learning rate decays to it"
    ),
    Rule(
        trainer.Optimizer,
        "decaySteps",
        "must come with decay Linear or Cosine",
        "set decay, or leave decaySteps out",
        lambda it: it.decay_steps is None or it.decay is not Decay.NONE,
        "!has(self.decaySteps) || self.decay != 'None'",
        lambda it: it.decay,
    ),
    compare_fields(
        RunSpec,
        "trainer.loss.overlong.bufferTokens",
        "<=",
        "generation.sampling.maxTokens",
        "lower it; the penalty starts this many tokens before the limit",
    ),
)


def _list_bad_addresses(holder: store.RedisStore | store.Sentinel) -> str:
    return ", ".join(repr(it) for it in holder.addresses if re.fullmatch(_ADDRESS, it) is None)


_ADDRESSES_CEL = f"self.addresses.all(address, address.matches({_quote_cel(_ADDRESS)}))"
_ADDRESSES_REMEDY = "write them as in redis-0.redis:6379; password and database have their own fields"
REDIS = (
    Rule(
        store.RedisStore,
        "sentinel",
        "must not be given together with addresses",
        "give the servers' addresses, or Sentinels",
        lambda redis: redis.sentinel is None or not redis.addresses,
        "!has(self.sentinel) || self.addresses.size() == 0",
        lambda redis: "both",
    ),
    Rule(
        store.RedisStore,
        "addresses",
        "must be given unless sentinel is",
        "give the servers' addresses, or Sentinels",
        lambda redis: redis.sentinel is not None or len(redis.addresses) > 0,
        "has(self.sentinel) || self.addresses.size() > 0",
        lambda redis: "none",
    ),
    Rule(
        store.RedisStore,
        "addresses",
        "must each be HOST:PORT",
        _ADDRESSES_REMEDY,
        lambda redis: not _list_bad_addresses(redis),
        _ADDRESSES_CEL,
        _list_bad_addresses,
    ),
    Rule(
        store.Sentinel,
        "addresses",
        "must each be HOST:PORT",
        _ADDRESSES_REMEDY,
        lambda sentinel: len(sentinel.addresses) > 0 and not _list_bad_addresses(sentinel),
        f"self.addresses.size() > 0 && {_ADDRESSES_CEL}",
        lambda sentinel: _list_bad_addresses(sentinel) or "none",
    ),
    Rule(
        store.RedisStore,
        "username",
        "must come with a password",
        "give password too, or leave username out",
        lambda redis: redis.username is None or redis.password is not None,
        "!has(self.username) || has(self.password)",
        lambda redis: "none",
    ),
    Rule(
        store.Tls,
        "",
        "must have both certFile and keyFile or neither",
        "give both",
        lambda tls: (tls.cert_file is None) == (tls.key_file is None),
        "has(self.certFile) == has(self.keyFile)",
        lambda tls: "certFile alone" if tls.key_file is None else "keyFile alone",
    ),
    Rule(
        store.RedisStore,
        "keyPrefix",
        "must be 1 to 200 letters, digits and :._/-",
        "use a prefix such as specrl:team:run",
        lambda redis: redis.key_prefix is None or re.fullmatch(_KEY_PREFIX, redis.key_prefix) is not None,
        f"!has(self.keyPrefix) || self.keyPrefix.matches({_quote_cel(_KEY_PREFIX)})",
    ),
)


def _is_mixed(source: HubSource) -> bool:
    """Whether some of the files are absolute paths, and others are not."""
    return len({file.startswith("/") for file in source.files}) > 1


def _require_name(section: type[Section]) -> Rule[Any]:
    """Build the rule that a revision is given only beside a name on the hub."""
    matches = f"self.path.matches({_quote_cel(HUB_NAME_PATTERN)})"
    if is_optional(section.model_fields["path"]):
        matches = f"has(self.path) && {matches}"
    return Rule(
        section,
        "revision",
        "must not be given unless path is a name on the hub",
        "leave it out for a folder, or write path: OWNER/NAME",
        lambda holder: holder.revision is None or (holder.path is not None and is_hub_name(holder.path)),
        f"!has(self.revision) || {matches}",
    )


HUB = (
    *(_require_name(section) for section in (Model, Eagle3, DraftModel, trainer.ReferenceKl)),
    Rule(
        HubSource,
        "files",
        "must all be absolute paths, or all names in the repository",
        "leave them out, and the data set's card says which files belong to the split",
        lambda source: not _is_mixed(source),
        "self.files.all(file, file.startsWith('/')) || self.files.all(file, !file.startsWith('/'))",
        lambda source: ", ".join(source.files),
    ),
)


RULES: tuple[Rule[Any], ...] = (
    *UNIONS,
    *SAMPLING,
    *DRAFTER,
    *PARALLELISM,
    *ENGINE,
    *BETWEEN_SECTIONS,
    *DECIMALS,
    *PROMPTS,
    *WITHIN_SECTIONS,
    *TRAINING,
    *REDIS,
    *HUB,
)
