"""Rules that no single field can state. Each is one function from a RunSpec to the problems it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic.alias_generators import to_camel

from specrl.errors import Problem
from specrl.spec.base import Union
from specrl.spec.data import PromptSource
from specrl.spec.generation import Speculation
from specrl.spec.run import RunSpec

Rule = Callable[[RunSpec], Iterator[Problem]]


def unions_have_one_member(spec: RunSpec) -> Iterator[Problem]:
    """Every Kubernetes-style union has exactly one member set."""
    unions: list[tuple[str, Union, tuple[str, ...]]] = [
        ("prompts.source", spec.prompts.source, ("jsonl", "parquet", "generated")),
        ("rewards", spec.rewards, ("math", "exact")),
        ("generation.speculation", spec.generation.speculation, tuple(Speculation.model_fields)),
        ("store", spec.store, ("sqlite",)),
    ]
    if spec.validation is not None:
        unions.append(("validation.source", spec.validation.source, ("jsonl", "parquet", "generated")))
    for path, union, members in unions:
        given = [to_camel(name) for name in members if getattr(union, name) is not None]
        if len(given) != 1:
            got, names = ", ".join(given) or "none", ", ".join(map(to_camel, members))
            yield Problem(path, f"must have exactly one of {names}, got {got}", "keep the one you mean")


def sampling_can_be_corrected(spec: RunSpec) -> Iterator[Problem]:
    """The trainer's importance ratio is over the whole softmax at the sampling temperature."""
    sampling = spec.generation.sampling
    if sampling.temperature <= 0:
        yield Problem(
            "generation.sampling.temperature",
            f"must be > 0, got {sampling.temperature}",
            'use "1"; greedy rollouts of one prompt are all the same and teach nothing',
        )
    if sampling.top_p != 1:
        yield Problem(
            "generation.sampling.topP",
            f"must be 1, got {sampling.top_p}",
            'use "1"; a truncated distribution would bias the importance ratio',
        )
    if sampling.top_k != 0:
        yield Problem(
            "generation.sampling.topK",
            f"must be 0, got {sampling.top_k}",
            "use 0; a truncated distribution would bias the importance ratio",
        )


def lengths_fit(spec: RunSpec) -> Iterator[Problem]:
    """Prompt, completion and draft fit the model's length; the engine checks drafts past the end of the context."""
    longest = spec.prompts.max_tokens + spec.generation.sampling.max_tokens
    room = spec.model.max_length - (spec.generation.speculation.num_draft_tokens + 1)
    if longest > room:
        yield Problem(
            "model.maxLength",
            f"must be >= prompts.maxTokens + generation.sampling.maxTokens + draft tokens + 1, "
            f"got {spec.model.max_length} < {longest + spec.model.max_length - room}",
            f"raise it to {longest + spec.model.max_length - room}, or shorten prompts or completions",
        )


def fractions_are_in_range(spec: RunSpec) -> Iterator[Problem]:
    """Ranges of decimals, which the type itself does not bound."""
    optimizer, loss, drafter = spec.trainer.optimizer, spec.trainer.loss, spec.trainer.drafter
    positive = [
        ("trainer.optimizer.learningRate", optimizer.learning_rate),
        ("trainer.optimizer.epsilon", optimizer.epsilon),
        ("trainer.optimizer.clipNorm", optimizer.clip_norm),
        ("trainer.loss.clipHigh", loss.clip_high),
        ("trainer.loss.clipLow", loss.clip_low),
        ("trainer.drafter.learningRate", drafter.learning_rate),
        ("trainer.drafter.clipNorm", drafter.clip_norm),
    ]
    bounds = [("canary.maxMeanAbs", spec.canary.max_mean_abs), ("canary.maxAbs", spec.canary.max_abs)]
    positive += [(path, bound) for path, bound in bounds if bound is not None]
    for path, value in positive:
        if value <= 0:
            yield Problem(path, f"must be > 0, got {value}", "give a positive decimal")
    for path, value in [("trainer.optimizer.beta1", optimizer.beta1), ("trainer.optimizer.beta2", optimizer.beta2)]:
        if not 0 <= value < 1:
            yield Problem(path, f"must be >= 0 and < 1, got {value}", 'use "0.9" or "0.95"')
    if not 0 <= drafter.initialisation.held_out < 1:
        value = drafter.initialisation.held_out
        yield Problem("trainer.drafter.initialisation.heldOut", f"must be >= 0 and < 1, got {value}", 'use "0.1"')
    not_negative = [
        ("trainer.optimizer.weightDecay", optimizer.weight_decay),
        ("trainer.loss.importanceCap", loss.importance_cap),
    ]
    if spec.validation is not None:
        not_negative.append(("validation.sampling.temperature", spec.validation.sampling.temperature))
    for path, value in not_negative:
        if value < 0:
            yield Problem(path, f"must be >= 0, got {value}", "give 0 or a positive decimal")


def lookup_window_is_ordered(spec: RunSpec) -> Iterator[Problem]:
    """An n-gram window needs min <= max."""
    ngram = spec.generation.speculation.ngram
    if ngram is not None and ngram.lookup_min > ngram.lookup_max:
        yield Problem(
            "generation.speculation.ngram.lookupMin",
            f"must be <= lookupMax, got {ngram.lookup_min} > {ngram.lookup_max}",
            "swap the two",
        )


def templates_name_the_question(spec: RunSpec) -> Iterator[Problem]:
    """A template without the question would ask the same thing every time."""
    if "{question}" not in spec.prompts.template:
        yield Problem(
            "prompts.template",
            f"must contain {{question}}, got {spec.prompts.template!r}",
            "write {question} where the problem's text belongs",
        )


def greedy_validation_draws_once(spec: RunSpec) -> Iterator[Problem]:
    """Several greedy completions of one prompt are the same completion."""
    validation = spec.validation
    if validation and validation.sampling.temperature == 0 and validation.sampling.samples_per_prompt > 1:
        yield Problem(
            "validation.sampling.samplesPerPrompt",
            f"must be 1 at temperature 0, got {validation.sampling.samples_per_prompt}",
            "raise the temperature or ask for one sample",
        )


def training_and_validation_differ(spec: RunSpec) -> Iterator[Problem]:
    """Accuracy on trained problems measures memory."""
    if spec.validation is None:
        return
    mine: PromptSource = spec.prompts.source
    if mine == spec.validation.source:
        yield Problem(
            "validation.source",
            "must differ from prompts.source, got the same problems",
            "use a held-out file, or another seed of the generated family",
        )


RULES: tuple[Rule, ...] = (
    unions_have_one_member,
    sampling_can_be_corrected,
    lengths_fit,
    fractions_are_in_range,
    lookup_window_is_ordered,
    templates_name_the_question,
    greedy_validation_draws_once,
    training_and_validation_differ,
)
