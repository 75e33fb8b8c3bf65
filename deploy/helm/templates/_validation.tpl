{{/*
Rules between values, checked before anything is created. Each message says what is wrong and what to do.
values.schema.json has the rules of single values. tests/integration/chart breaks every rule.
*/}}
{{- define "specrl.validation" -}}
{{- $values := .Values }}

{{- if contains "://" $values.images.registry }}
{{- fail (printf "images.registry must be a registry and a folder without a scheme, got %s; use for example registry.example.com/specrl" $values.images.registry) }}
{{- end }}

{{- range $name := list "control" "generation" "trainer" }}
{{- if not (or $values.images.registry $values.images.preloaded (get $values.images $name).digest) }}
{{- fail (printf "images.registry must name where the nodes pull specrl's images from, got none and no images.%s.digest; specrl publishes no images. Build them with `make images`, which writes the digests, or name your registry (docs/release.md), or set images.preloaded=true if all nodes have the images, as on kind" $name) }}
{{- end }}
{{- end }}

{{- range $key, $value := $values.commonLabels }}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (eq $key "helm.sh/chart") }}
{{- fail (printf "commonLabels must not set %s, which the chart sets itself; use a key of your own, such as team" $key) }}
{{- end }}
{{- end }}

{{- if and (not $values.operator.serviceAccount.create) (not $values.operator.serviceAccount.name) }}
{{- fail "operator.serviceAccount.name must name an existing ServiceAccount when operator.serviceAccount.create is false, got none; name one, or let the chart create one. To use the namespace's default account, set name: default" }}
{{- end }}

{{- if and (not $values.rbac.create) $values.operator.serviceAccount.create }}
{{- fail "rbac.create must be true when operator.serviceAccount.create is, got rbac.create=false; the new account would have no rights. Grant the rules of templates/operator/_rules.tpl to an existing account, name it in operator.serviceAccount.name, and set operator.serviceAccount.create=false" }}
{{- end }}

{{- if ne (len $values.operator.watchNamespaces) (len (uniq $values.operator.watchNamespaces)) }}
{{- fail (printf "operator.watchNamespaces must name each namespace once, got %s; remove the repeated ones" (join ", " $values.operator.watchNamespaces)) }}
{{- end }}

{{- if and $values.networkPolicy.enabled (not $values.networkPolicy.apiServerPorts) }}
{{- fail "networkPolicy.apiServerPorts must name the API server's port when networkPolicy.enabled is true, got none; without it the operator cannot reach the API server. Use [443, 6443], or the port of `kubectl get endpointslices -l kubernetes.io/service-name=kubernetes`" }}
{{- end }}

{{- if and $values.valkey.enabled (not $values.valkey.existingSecret) }}
{{- fail "valkey.existingSecret must name a Secret with the key users.acl when valkey.enabled is true, got none; create it with the commands in docs/deploy.md. Without passwords, every pod that reaches the store could use it" }}
{{- end }}

{{- if and $values.integrations.keda (not $values.monitoring.prometheusUrl) }}
{{- fail "monitoring.prometheusUrl must be set when integrations.keda is true, got none; KEDA queries Prometheus. Use for example http://prometheus-operated.monitoring:9090" }}
{{- end }}

{{- range $name := list "serviceMonitor" "podMonitor" "prometheusRule" }}
{{- range $key, $value := (get $values.monitoring $name).labels }}
{{- if hasPrefix "app.kubernetes.io/" $key }}
{{- fail (printf "monitoring.%s.labels must not set %s, which the chart sets itself; use the label that your Prometheus selects by, such as release: kube-prometheus-stack" $name $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
