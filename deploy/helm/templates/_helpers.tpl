{{/* Names of objects: the release's name, followed by the chart's unless it contains it. Cut to 40 characters, so that
     suffixes fit into the 63 of a label. */}}
{{- define "specrl.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "specrl.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "specrl.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "specrl.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Labels that never change during a release, since selectors of a Deployment are immutable. */}}
{{- define "specrl.selectorLabels" -}}
app.kubernetes.io/name: {{ include "specrl.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "specrl.labels" -}}
{{ include "specrl.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "specrl.serviceAccountName" -}}
{{- if .Values.operator.serviceAccount.create }}
{{- default (include "specrl.fullname" .) .Values.operator.serviceAccount.name }}
{{- else }}
{{- .Values.operator.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* image: (dict "root" $ "image" .Values.images.control) - registry/repository@digest, or :tag */}}
{{- define "specrl.image" -}}
{{- $registry := .root.Values.images.registry | trimSuffix "/" }}
{{- $repository := .image.repository }}
{{- if $registry }}{{- $repository = printf "%s/%s" $registry $repository }}{{- end }}
{{- if .image.digest }}
{{- printf "%s@%s" $repository .image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (.image.tag | default .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* The image of a store. It is not one of specrl's, so images.registry does not apply. */}}
{{- define "specrl.storeImage" -}}
{{- with .Values.images.store }}
{{- .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}
{{- end }}

{{- define "specrl.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* podSecurityContext: (dict "root" $ "uid" 999) - the "restricted" Pod Security Standard, for every pod of the chart.
     Without uid: 65532, which is the images' user. */}}
{{- define "specrl.podSecurityContext" -}}
runAsNonRoot: true
{{- if .root.Values.podSecurity.fixedUids }}
runAsUser: {{ .uid | default 65532 }}
runAsGroup: {{ .uid | default 65532 }}
fsGroup: {{ .uid | default 65532 }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "specrl.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* monitor: (dict "root" $ "enabled" X "kind" "ServiceMonitor") - "true" if the object is created; values.yaml explains `enabled` */}}
{{- define "specrl.monitor" -}}
{{- if kindIs "bool" .enabled }}
{{- ternary "true" "" .enabled }}
{{- else if .root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind) }}
{{- "true" }}
{{- end }}
{{- end }}

{{/* Egress to DNS, for every policy that restricts egress. */}}
{{- define "specrl.egressToDns" -}}
- to:
    - namespaceSelector:
        matchLabels: {kubernetes.io/metadata.name: kube-system}
      podSelector:
        matchLabels:
          {{- toYaml .Values.networkPolicy.dnsPodSelector | nindent 10 }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}
