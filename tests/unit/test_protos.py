"""Comments of the wire protocol. The stubs carry them into editors, so `protos/` is the protocol's documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

PROTOS = Path(__file__).parents[2] / "protos"

# Field numbers in a SourceCodeInfo.Location's path: protobuf's descriptor.proto.
MESSAGES = FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER
ENUMS = FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER
SERVICES = FileDescriptorProto.SERVICE_FIELD_NUMBER
FIELDS = DescriptorProto.FIELD_FIELD_NUMBER
VALUES = EnumDescriptorProto.VALUE_FIELD_NUMBER
METHODS = ServiceDescriptorProto.METHOD_FIELD_NUMBER


def parse_protos(folder: Path, output: Path) -> FileDescriptorSet:
    """Parse every .proto file below `folder`, comments included. output: a scratch file."""
    files = [str(path) for path in sorted(folder.rglob("*.proto"))]
    status = protoc.main(
        ["protoc", f"--proto_path={folder}", "--include_source_info", f"--descriptor_set_out={output}", *files]
    )
    assert status == 0, "protoc prints what is wrong to standard error"
    return FileDescriptorSet.FromString(output.read_bytes())


def list_members(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the path of every field, enum value and call. Messages of this project are not nested."""
    for i, message in enumerate(file.message_type):
        assert all(nested.options.map_entry for nested in message.nested_type), f"{message.name} nests a message"
        yield from ((f"{message.name}.{field.name}", (MESSAGES, i, FIELDS, j)) for j, field in enumerate(message.field))
    for i, enum in enumerate(file.enum_type):
        yield from ((f"{enum.name}.{value.name}", (ENUMS, i, VALUES, j)) for j, value in enumerate(enum.value))
    for i, service in enumerate(file.service):
        yield from ((f"{service.name}.{call.name}", (SERVICES, i, METHODS, j)) for j, call in enumerate(service.method))


def find_members_without_comment(protos: FileDescriptorSet) -> list[str]:
    missing: list[str] = []
    for file in protos.file:
        commented = {
            tuple(location.path)
            for location in file.source_code_info.location
            if (location.leading_comments + location.trailing_comments).strip()
        }
        missing += [name for name, path in list_members(file) if path not in commented]
    return missing


def test_every_field_enum_value_and_call_has_a_comment(tmp_path: Path) -> None:
    protos = parse_protos(PROTOS, tmp_path / "protos")
    assert len(protos.file) == len(list(PROTOS.rglob("*.proto"))) > 0
    assert find_members_without_comment(protos) == [], "say the unit, and what absence means (CONTRIBUTING.md)"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("message M {\n  int32 a = 1;  // seconds\n  int32 b = 2;\n}", ["M.b"]),
        ("message M {\n  // bytes\n  int32 a = 1;\n\n  int32 b = 2;\n}", ["M.b"]),
        ("// of the enum\nenum E {\n  E_UNSPECIFIED = 0;\n}", ["E.E_UNSPECIFIED"]),
        ("message M {}\nservice S {\n  rpc Do(M) returns (M);\n}", ["S.Do"]),
    ],
)
def test_a_missing_comment_is_found(tmp_path: Path, text: str, missing: list[str]) -> None:
    folder = tmp_path / "protos"
    folder.mkdir()
    (folder / "sample.proto").write_text(f'syntax = "proto3";\npackage sample;\n{text}\n', encoding="utf-8")
    assert find_members_without_comment(parse_protos(folder, tmp_path / "parsed")) == missing
