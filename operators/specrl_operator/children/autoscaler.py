"""The autoscaler of a job's replicas: a HorizontalPodAutoscaler, or a KEDA ScaledObject. Pure.

It scales the RLJob by its scale subresource, so that spec.generation.replicas stays the one number.

Both follow one metric, the coordinator's `specrl_coordinator_replicas_demand`: the replicas with which generation would
be under way just as long as the trainer works. The target is how many times as long it may be, which follows from the
share of exposed generation that the job allows. As the metric is a number of replicas (AverageValue), the autoscaler
asks for demand / target replicas, whatever their present number is. Without data it changes nothing.

The rule is simulated in tests/unit/simulator/test_autoscaling.py.
"""

from __future__ import annotations

from specrl.spec.cluster import Autoscaling, Scaler
from specrl_operator import kinds
from specrl_operator.api import GENERATION, Object
from specrl_operator.plan.job_plan import JobPlan

METRIC = "specrl_coordinator_replicas_demand"
"""Name of the coordinator's series, and of the external metric (deploy/helm/templates/monitoring/adapter.yaml)."""
HEADROOM = 0.8
"""Share of the time that generation may take, of what would just fit, where it overlaps training. Each waits for the
other now and then: in the simulation, with generation under way as long as training, training waited 29 % of a step."""
SCALE_DOWN_S = 900
"""Stabilization window before a replica is removed. Loading a model takes minutes, so removing one is costly."""
PERIOD_S = 300
"""Period of the limits on added and removed replicas."""


def find_target(exposed_percent: int, max_policy_lag: int) -> float:
    """Return how many times as long as the trainer works generation may be under way.

    With s, the share of a step in which training may wait: s / (1 - s) if they take turns (lag 0). If generation
    overlaps training, 1 / (1 - s), less HEADROOM.
    """
    share = exposed_percent / 100
    return (HEADROOM if max_policy_lag else share) / (1 - share)


def build_autoscaler(plan: JobPlan, wanted: Autoscaling) -> Object:
    """Build the autoscaler."""
    job = plan.job
    metadata = job.build_metadata(GENERATION)
    reference = kinds.RLJOB.build_reference(name=job.name)
    target = find_target(wanted.target_exposed_percent, job.spec.schedule.max_policy_lag)
    behavior = {
        "scaleUp": {
            "policies": [{"type": "Pods", "value": wanted.added_per_period, "periodSeconds": PERIOD_S}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": SCALE_DOWN_S,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": PERIOD_S}],
        },
    }
    if wanted.by is Scaler.HPA:
        # The path of the request names the namespace, which the adapter adds as a label.
        metric = {"name": METRIC, "selector": {"matchLabels": {"rljob": job.name}}}
        spec: Object = {
            "scaleTargetRef": reference,
            "minReplicas": wanted.min_replicas,
            "maxReplicas": wanted.max_replicas,
            "behavior": behavior,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": metric,
                        "target": {"type": "AverageValue", "averageValue": f"{round(1000 * target)}m"},
                    },
                }
            ],
        }
        return kinds.AUTOSCALER.build_object(metadata, spec=spec)
    trigger = {
        "serverAddress": plan.settings.prometheus_url,
        "query": f'max({METRIC}{{namespace="{job.namespace}",rljob="{job.name}"}})',
        "threshold": f"{target:.3f}",
        "ignoreNullValues": "false",  # no data would otherwise be 0, and remove replicas
    }
    spec = {
        "scaleTargetRef": reference,
        "minReplicaCount": wanted.min_replicas,
        "maxReplicaCount": wanted.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": trigger}],
    }
    return kinds.SCALED_OBJECT.build_object(metadata, spec=spec)
