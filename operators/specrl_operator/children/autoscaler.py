"""The autoscaler of a job's replicas: a HorizontalPodAutoscaler, or a KEDA ScaledObject. Pure.

It scales the RLJob by its scale subresource, so that spec.generation.replicas stays the one number.
"""

from __future__ import annotations

from specrl.spec.cluster import Autoscaling, Scaler
from specrl_operator import kinds
from specrl_operator.api import GENERATION, Object
from specrl_operator.plan.job_plan import JobPlan

SCALE_DOWN_S = 900
"""Stabilization window before a replica is removed. Steps take minutes, so the window must hold several."""


def build_autoscaler(plan: JobPlan, wanted: Autoscaling) -> Object:
    """Build the autoscaler. It targets the percentage of a step's time in which training waited for rollouts."""
    job = plan.job
    metadata = job.build_metadata(GENERATION)
    target = kinds.RLJOB.build_reference(name=job.name)
    slowly = {
        "scaleUp": {
            "stabilizationWindowSeconds": 120,
            "policies": [{"type": "Pods", "value": 2, "periodSeconds": 300}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": SCALE_DOWN_S,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}],
        },
    }
    if wanted.by is Scaler.HPA:
        labels = {"matchLabels": {"rljob": job.name, "namespace": job.namespace}}
        spec: Object = {
            "scaleTargetRef": target,
            "minReplicas": wanted.min_replicas,
            "maxReplicas": wanted.max_replicas,
            "behavior": slowly,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": "specrl_exposed_generation_percent", "selector": labels},
                        "target": {"type": "Value", "value": str(wanted.target_exposed_percent)},
                    },
                }
            ],
        }
        return kinds.AUTOSCALER.build_object(metadata, spec=spec)
    # KEDA queries Prometheus itself. The expression is that of the recording rule specrl:exposed_generation:share
    # (deploy/helm/files/rules.yaml), in percent.
    series = f'namespace="{job.namespace}",rljob="{job.name}"'
    waited = f"sum(rate(specrl_coordinator_exposed_generation_seconds_total{{{series}}}[15m]))"
    query = f"100 * {waited} / sum(rate(specrl_coordinator_step_seconds_sum{{{series}}}[15m]))"
    spec = {
        "scaleTargetRef": target,
        "minReplicaCount": wanted.min_replicas,
        "maxReplicaCount": wanted.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": slowly}},
        "triggers": [
            {
                "type": "prometheus",
                "metricType": "Value",
                "metadata": {
                    "serverAddress": plan.settings.prometheus_url,
                    "query": query,
                    "threshold": str(wanted.target_exposed_percent),
                },
            }
        ],
    }
    return kinds.SCALED_OBJECT.build_object(metadata, spec=spec)
