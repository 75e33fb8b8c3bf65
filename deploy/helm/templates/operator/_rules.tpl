{{/*
What the operator may do to objects of RLJobs' namespaces: the content of a ClusterRole, or of a Role in each of
operator.watchNamespaces. Listed per object and verb; no wildcard, and no list of secrets: a job names its Secrets, the kubelet
mounts them. `patch` is server-side apply, which also needs `create` for what is not there yet.
*/}}
{{- define "specrl.operatorRules" -}}
# RLJobs are written by their users. The operator reads them, writes their status, and deletes those whose
# ttlSecondsAfterFinished is over. It never writes a spec: spec.generation.replicas belongs to `kubectl scale` and HPAs.
- apiGroups: [specrl.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
- apiGroups: [specrl.dev]
  resources: [rljobs/status]
  verbs: [patch]
# To own children with blockOwnerDeletion where the cluster enforces who may (OpenShift does).
- apiGroups: [specrl.dev]
  resources: [rljobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# The password of a job's own store, <job>-store, and with tls.mode CertManager <job>-<role>-tls, which cert-manager fills:
# made once, and looked for by name, as tls.secretName is. None can be listed.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# The coordinator's Role: patch of its own job's status, which the operator has itself, so that nothing is
# escalated.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# generation.autoscaling
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
{{- with .Values.integrations }}
{{- if .jobSet }}
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .leaderWorkerSet }}
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .computeDomain }}
- apiGroups: [resource.nvidia.com]
  resources: [computedomains]
  verbs: [get, list, watch, create, patch, delete]
# The claim template that NVIDIA's driver makes for it: pods wait until it exists.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get]
{{- end }}
{{- if .certManager }}
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .volcano }}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .keda }}
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end }}
{{- end }}
