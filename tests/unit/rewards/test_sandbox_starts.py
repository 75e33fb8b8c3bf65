"""Where the kernel lets programs be isolated, our sandbox starts.

The other tests of sandboxes are skipped where none starts. So they are skipped by a sandbox that we have broken, too.
"""

from __future__ import annotations

import subprocess

import pytest

from specrl.rewards import verifier_for
from specrl.spec.data import CodeVerifier, Isolation, Rewards

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "true"]


def test_a_machine_that_has_user_namespaces_is_not_refused(forkable: None) -> None:
    try:
        tried = subprocess.run(UNSHARE, check=False, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("unproven that the sandbox starts: there is no unshare (util-linux)")
    if tried.returncode != 0:
        pytest.skip(f"unproven that the sandbox starts: {tried.stderr.strip()}")
    verifier_for(Rewards(code=CodeVerifier(isolation=Isolation.NAMESPACES))).ready()
