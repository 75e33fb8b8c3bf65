{{/*
The operator's rights in namespaces with RLJobs: the rules of a ClusterRole, or of a Role in each of
operator.watchNamespaces. Every resource and verb is listed; there are no wildcards, and Secrets cannot be listed.
`patch` is for server-side apply, which also needs `create` for objects that do not exist yet.
*/}}
{{- define "specrl.operatorRules" -}}
# The operator reads RLJobs, writes their status, and deletes those whose ttlSecondsAfterFinished has passed. It never
# writes a spec: users own it, and `kubectl scale` and autoscalers change spec.generation.replicas.
- apiGroups: [specrl.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
- apiGroups: [specrl.dev]
  resources: [rljobs/status]
  verbs: [patch]
# For children with blockOwnerDeletion, on clusters that enforce OwnerReferencesPermissionEnforcement, as OpenShift does.
- apiGroups: [specrl.dev]
  resources: [rljobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# The Secrets <job>-store (the password of a job's own store) and, with tls.mode CertManager, <job>-<role>-tls. The
# operator creates them once and gets them by name, as it does the one in tls.secretName.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
# Why pods cannot be created, which only the events of their owners say.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# For the Role of a job's coordinator, which may patch its own job's status, and ask who may read the job in its
# namespace. The operator has these rights itself, so Kubernetes lets it grant them.
- apiGroups: [authorization.k8s.io]
  resources: [localsubjectaccessreviews]
  verbs: [create]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# For generation.autoscaling with by: HPA.
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
# The claim template that NVIDIA's driver creates for a ComputeDomain. The operator creates GPU pods once it exists.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [list, watch]
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
