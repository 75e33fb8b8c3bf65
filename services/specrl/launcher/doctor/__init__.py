"""Examines this machine and this installation for `specrl doctor`. It changes nothing, and starts nothing large."""
