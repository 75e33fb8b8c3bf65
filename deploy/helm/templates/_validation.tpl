{{/*
Combinations of values that cannot work, refused before anything is created. One rule each; the message says what is
wrong and what to do. What a single value may be is in values.schema.json. tests/integration/chart breaks every rule.
*/}}
{{- define "specrl.validation" -}}
{{- $values := .Values }}

{{- if and (not $values.operator.serviceAccount.create) (not $values.operator.serviceAccount.name) }}
{{- fail "operator.serviceAccount.name must name an existing ServiceAccount when operator.serviceAccount.create is false, got none; name it, or let the chart create one. The namespace's default account is not used unless you name it" }}
{{- end }}

{{- if and (not $values.rbac.create) $values.operator.serviceAccount.create }}
{{- fail "rbac.create must be true when operator.serviceAccount.create is, got rbac.create=false; an account without rights leaves the operator unable to do anything. Grant the rules of templates/operator/_rules.tpl to an account of yours, and name it in operator.serviceAccount" }}
{{- end }}

{{- if ne (len $values.operator.watchNamespaces) (len (uniq $values.operator.watchNamespaces)) }}
{{- fail (printf "operator.watchNamespaces must name each namespace once, got %s; two Roles of one name cannot be installed" (join ", " $values.operator.watchNamespaces)) }}
{{- end }}

{{- if and $values.networkPolicy.enabled (not $values.networkPolicy.apiServerPorts) }}
{{- fail "networkPolicy.apiServerPorts must name the API server's port when networkPolicy.enabled is true, got none; without it the operator reaches nothing. Use [443, 6443], or the port of `kubectl get endpointslices -l kubernetes.io/service-name=kubernetes`" }}
{{- end }}

{{- if and $values.valkey.enabled (not $values.valkey.existingSecret) }}
{{- fail "valkey.existingSecret must name a Secret with the key users.acl when valkey.enabled is true, got none; a store without passwords is open to every pod that reaches it. docs/deploy.md has the commands" }}
{{- end }}

{{- if and $values.integrations.keda (not $values.monitoring.prometheusUrl) }}
{{- fail "monitoring.prometheusUrl must be set when integrations.keda is true, got none; KEDA asks Prometheus itself how much generation is exposed. Use for example http://prometheus-operated.monitoring:9090" }}
{{- end }}

{{- range $name := list "serviceMonitor" "podMonitor" "prometheusRule" }}
{{- range $key, $value := (get $values.monitoring $name).labels }}
{{- if hasPrefix "app.kubernetes.io/" $key }}
{{- fail (printf "monitoring.%s.labels must not set %s, which the chart sets itself; Prometheus selects by a label such as release: kube-prometheus-stack" $name $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
