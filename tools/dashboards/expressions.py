"""Build PromQL over the series of runs. Every expression selects by the variables `namespace` and `rljob`.

Invariant: series of different runs are never summed. The dashboards' modules call this one.
"""

from __future__ import annotations


def select_series(metric: str, where: str = "") -> str:
    """Select a metric's series by the variables and by `where`, a further label matcher."""
    selectors = ['namespace=~"$namespace"', 'rljob=~"$rljob"', *([where] if where else [])]
    return f"{metric}{{{','.join(selectors)}}}"


def sum_rate(metric: str, by: str = "", where: str = "") -> str:
    """Build a counter's rate per second, summed per run and `by`, a list of labels."""
    return f"sum by ({_list_labels(by)}) (rate({select_series(metric, where)}[$__rate_interval]))"


def latest_value(metric: str, by: str = "", how: str = "sum", where: str = "") -> str:
    """Build a gauge's newest value, aggregated by `how` per run and `by`, a list of labels."""
    return f"{how} by ({_list_labels(by)}) ({select_series(metric, where)})"


def histogram_mean(histogram: str, by: str = "") -> str:
    """Build the mean of a histogram's observations."""
    return divide_series(sum_rate(f"{histogram}_sum", by), sum_rate(f"{histogram}_count", by))


def divide_series(above: str, below: str) -> str:
    """Build the quotient of two expressions with the same labels; no value where the divisor is 0."""
    return f"{above} / ({below} > 0)"


def ratio_to_run(above: str, below: str) -> str:
    """Build the quotient of an expression with further labels and one with the labels of the run only."""
    # Without the empty list, the parser would read the parenthesized divisor as labels of group_left.
    return f"{above} / on (namespace, rljob) group_left () ({below} > 0)"


def histogram_quantile(share: float, histogram: str, by: str = "") -> str:
    """Build a quantile of a histogram's observations. share: 0.95 is the 95th percentile."""
    return f"histogram_quantile({share}, {sum_rate(f'{histogram}_bucket', f'{by}, le' if by else 'le')})"


def histogram_heat(histogram: str) -> str:
    """Build a heat map: observations per bucket, summed over all selected runs."""
    return f"sum by (le) (increase({select_series(f'{histogram}_bucket')}[$__rate_interval]))"


def _list_labels(by: str) -> str:
    return f"namespace, rljob, {by}" if by else "namespace, rljob"
