"""With maxPolicyLag 0 and the same seed, two runs of real engines and a real trainer write the same bytes.

tests/integration/coordinator/test_loop.py tests that another seed leads to other rollouts.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from tests.fork_server import ForkServer
from tests.integration.box_runs import a_synchronous_run, train_to_end, write_questions
from tests.integration.forked_run import ForkedRun
from tests.integration.runs import checksums

pytestmark = pytest.mark.slow


@pytest.mark.timeout(2800)
def test_the_same_seed_gives_the_same_bytes(
    tmp_path: Path, box_policy: Path, synchronous_run: ForkedRun, ranks: ForkServer
) -> None:
    """Both runs have two steps. The policy and drafter that the first step trained generate the second."""
    first = checksums(synchronous_run.directory.path, 2)
    again = train_to_end(tmp_path, a_synchronous_run(box_policy, write_questions(tmp_path)), ranks)
    assert first == checksums(again.directory.path, 2)
    start_bytes = sha256((box_policy / "model.safetensors").read_bytes()).hexdigest()
    assert first["export/policy/model.safetensors"] != start_bytes, "the policy was trained"
