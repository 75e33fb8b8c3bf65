"""PromQL over series of runs: each selects by the variables `namespace` and `rljob`, and keeps the two apart."""

from __future__ import annotations


def series(metric: str, where: str = "") -> str:
    """The series of a metric that the variables select, and `where` besides."""
    selectors = ['namespace=~"$namespace"', 'rljob=~"$rljob"', *([where] if where else [])]
    return f"{metric}{{{','.join(selectors)}}}"


def rate(metric: str, by: str = "", where: str = "") -> str:
    """A counter's increase a second, summed per run and `by`."""
    return f"sum by ({_labels(by)}) (rate({series(metric, where)}[$__rate_interval]))"


def latest(metric: str, by: str = "", how: str = "sum", where: str = "") -> str:
    """A gauge, summed (or `how`) per run and `by`."""
    return f"{how} by ({_labels(by)}) ({series(metric, where)})"


def mean(histogram: str, by: str = "") -> str:
    """Mean of what a histogram observed."""
    return ratio(rate(f"{histogram}_sum", by), rate(f"{histogram}_count", by))


def ratio(above: str, below: str) -> str:
    """A quotient of two expressions with the same labels; nothing where the divisor is 0."""
    return f"{above} / ({below} > 0)"


def ratio_to_run(above: str, below: str) -> str:
    """The same where `above` has labels beyond those of the run, and `below` has not.

    The empty list keeps the parser from reading the divisor as labels of group_left.
    """
    return f"{above} / on (namespace, rljob) group_left () ({below} > 0)"


def quantile(share: float, histogram: str, by: str = "") -> str:
    """A quantile of what a histogram observed."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', f'{by}, le' if by else 'le')})"


def heat(histogram: str) -> str:
    """How often each bucket was observed, over all that the variables select."""
    return f"sum by (le) (increase({series(f'{histogram}_bucket')}[$__rate_interval]))"


def _labels(by: str) -> str:
    return f"namespace, rljob, {by}" if by else "namespace, rljob"
