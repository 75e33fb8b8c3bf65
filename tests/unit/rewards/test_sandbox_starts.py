"""The sandbox starts on every machine whose kernel permits isolation.

The other tests of sandboxes are skipped if none starts, so a broken sandbox would skip them, too. This test would fail.
"""

from __future__ import annotations

import subprocess

import pytest

from specrl.rewards.choice import verifier_for
from specrl.spec.data import CodeVerifier, Isolation, Rewards

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "true"]


def test_a_machine_that_has_user_namespaces_is_not_refused(forkable: None) -> None:
    try:
        tried = subprocess.run(UNSHARE, check=False, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("unproven that the sandbox starts: there is no unshare (util-linux)")
    if tried.returncode != 0:
        pytest.skip(f"unproven that the sandbox starts: {tried.stderr.strip()}")
    verifier_for(Rewards(code=CodeVerifier(isolation=Isolation.NAMESPACES))).prepare_worker()
