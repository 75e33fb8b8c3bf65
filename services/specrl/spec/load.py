"""From a file (or a mapping) to a RunSpec, reporting every problem at once with its path, rule and remedy.

Called by the CLI, by every process at its start, and by the operator. Nothing is rewritten: what loads is what was
written, with defaults filled in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from specrl.errors import Problem, SpecInvalid
from specrl.spec.base import OnCluster
from specrl.spec.cluster_rules import CLUSTER_RULES
from specrl.spec.rljob import envelope_problems, is_rljob, run_fields
from specrl.spec.rule import broken
from specrl.spec.rules import RULES
from specrl.spec.run import RunSpec
from specrl.spec.stand_ins import lasting_problems, section_of
from specrl.spec.yaml_input import parse_override, problem_of, read_documents

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml where PyYAML was built with it: the operator writes a run file at every look at a job."""


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a run file, apply `path=value` overrides, return the RunSpec.

    Paths inside the file become absolute, relative to the file's folder. An RLJob manifest, alone or among others, is
    read as the run that it stands for, and the rules of clusters are tried on it. Raises SpecInvalid with every problem
    found.
    """
    raw = _the_run(read_documents(path), path)
    is_manifest = is_rljob(raw)
    if is_manifest:
        raw = _run_of(raw)
    malformed = [problem for override in overrides for problem in _apply(raw, override)]
    if malformed:
        raise SpecInvalid(tuple(malformed))
    spec = parse_spec(raw, is_rljob=is_manifest)
    return _with_absolute_paths(spec, path.resolve().parent)


def _the_run(documents: Sequence[Any], path: Path) -> dict[str, Any]:
    """The run file, or the one RLJob among other manifests. Raises SpecInvalid if there is none, or more than one."""
    found = [document for document in documents if isinstance(document, dict)]
    if len(documents) > 1:
        found = [document for document in found if is_rljob(document)]
    if len(found) == 1:
        return found[0]
    rule, remedy = "must be a mapping of sections", "see examples/ for a run file"
    if len(documents) > 1:
        rule, remedy = f"must hold one RLJob, got {len(found)}", "give each a file of its own"
    raise SpecInvalid((Problem(str(path), rule, remedy),))


def parse_spec(raw: dict[str, Any], *, is_rljob: bool = False) -> RunSpec:
    """Check a mapping against the model and against every cross-field rule. Raises SpecInvalid with all problems.

    is_rljob: try the rules about the cluster, too, to which a local run does not pay attention.

    Cross-field rules are tried on the fields that are sound even when others are not: one run of the command lists
    everything there is to fix, and nothing that is owed to a field that is missing.
    """
    rules = (*RULES, *CLUSTER_RULES) if is_rljob else RULES
    try:
        spec = RunSpec.model_validate(raw)
    except ValidationError as error:
        errors = error.errors()
        found = [_problem(detail, is_rljob) for detail in errors]
        known = {problem.path for problem in found}
        found += [problem for problem in lasting_problems(raw, errors, rules) if problem.path not in known]
        raise SpecInvalid(tuple(found)) from error
    problems = tuple(broken(spec, rules))
    if problems:
        raise SpecInvalid(problems)
    return spec


def parse_rljob(manifest: Mapping[str, Any]) -> RunSpec:
    """The run of an RLJob as an API server holds it. Raises SpecInvalid with all problems."""
    return parse_spec(_run_of(manifest), is_rljob=True)


def _run_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The run file that an RLJob stands for. Raises SpecInvalid with what is wrong around its spec."""
    problems = tuple(envelope_problems(manifest))
    if problems:
        raise SpecInvalid(problems)
    return run_fields(manifest)


def dump(spec: RunSpec) -> str:
    """The run file as YAML, camelCase, with defaults, and without nulls and what only a cluster's operator reads.

    `load_spec` reads an equal run back: for a file without such fields, an equal RunSpec.
    """
    fields = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    text: str = yaml.dump(_of_the_run(RunSpec, fields), Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    return text


def digest(spec: RunSpec) -> str:
    """sha256 of the resolved run, the number of replicas aside: that may change while the run goes on."""
    fields = _of_the_run(RunSpec, spec.model_dump(mode="json", by_alias=True))
    del fields["generation"]["replicas"]
    return hashlib.sha256(yaml.safe_dump(fields, sort_keys=True).encode()).hexdigest()


def _of_the_run(section: type[BaseModel], fields: dict[str, Any]) -> dict[str, Any]:
    """A section's fields without those that only an operator reads."""
    kept: dict[str, Any] = {}
    for field in section.model_fields.values():
        value, inner = fields.get(str(field.alias), ...), section_of(field)
        if value is ... or OnCluster.ONLY in field.metadata:
            continue
        kept[str(field.alias)] = _of_the_run(inner, value) if inner is not None and isinstance(value, dict) else value
    return kept


def _apply(raw: dict[str, Any], override: str) -> Iterator[Problem]:
    """Set a field to what an override says, except that a fraction stays text, since run files have no floats."""
    try:
        given = parse_override(override, "schedule.maxPolicyLag=1")
    except SpecInvalid as error:
        yield from error.problems
        return
    if isinstance(given.value, float):
        given = replace(given, value=given.text)
    given.set_in(raw)


def _problem(detail: ErrorDetails, is_rljob: bool) -> Problem:
    problem = problem_of(detail, RunSpec, "see docs/run-file.md")
    return replace(problem, path="metadata.name") if is_rljob and problem.path == "name" else problem


def _with_absolute_paths(spec: RunSpec, base: Path) -> RunSpec:
    """Paths in the file are relative to the file, so that a run can be started from anywhere."""

    def moved(section: Any, *names: str) -> Any:
        """The section with those of these fields that are set as absolute paths."""
        paths = {name: getattr(section, name) for name in names}
        absolute = {n: str((base / Path(path).expanduser()).resolve()) for n, path in paths.items() if path is not None}
        return section.model_copy(update=absolute)

    def source(section: Any) -> Any:
        if section.kind == "generated":
            return section
        return section.model_copy(update={section.kind: moved(getattr(section, section.kind), "path")})

    update: dict[str, Any] = {
        "model": moved(spec.model, "path"),
        "prompts": spec.prompts.model_copy(update={"source": source(spec.prompts.source)}),
    }
    if spec.validation is not None:
        update["validation"] = spec.validation.model_copy(update={"source": source(spec.validation.source)})

    def programs(union: Any) -> Any:
        """A verifier or tool with the folders of its modules as absolute paths."""
        fields = {"code": "packages", "python": "folder"}
        found = {kind: moved(getattr(union, kind), name) for kind, name in fields.items() if getattr(union, kind)}
        return union.model_copy(update=found)

    update["rewards"] = programs(spec.rewards)
    if spec.tools is not None:
        update["tools"] = spec.tools.model_copy(update={"answered_by": programs(spec.tools.answered_by)})
    speculation = spec.generation.speculation
    drafter = speculation.eagle3 or speculation.draft_model
    if drafter is not None:
        update["generation"] = spec.generation.model_copy(
            update={"speculation": speculation.model_copy(update={speculation.kind: moved(drafter, "path")})}
        )
    loss = spec.trainer.loss
    if loss.reference_kl is not None:
        reference = loss.model_copy(update={"reference_kl": moved(loss.reference_kl, "path")})
        update["trainer"] = spec.trainer.model_copy(update={"loss": reference})
    redis = spec.redis
    if redis is not None and spec.store is not None:
        files = {"username": ("file",), "password": ("file",), "tls": ("ca_file", "cert_file", "key_file")}
        given = {name: getattr(redis, name) for name in files}
        parts = {name: moved(part, *files[name]) for name, part in given.items() if part is not None}
        if redis.sentinel is not None and redis.sentinel.password is not None:
            password = moved(redis.sentinel.password, "file")
            parts["sentinel"] = redis.sentinel.model_copy(update={"password": password})
        update["store"] = spec.store.model_copy(update={"redis": redis.model_copy(update=parts)})
    return spec.model_copy(update=update)
