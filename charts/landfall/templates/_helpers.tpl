{{- define "landfall.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "landfall.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "landfall.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "landfall.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "landfall.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The API server's own address, for pods that must work without the Service default/kubernetes. */}}
{{- define "landfall.apiServerEnv" -}}
{{- if .Values.kubernetesServiceHost }}
- name: KUBERNETES_SERVICE_HOST
  value: {{ .Values.kubernetesServiceHost | quote }}
- name: KUBERNETES_SERVICE_PORT
  value: {{ .Values.kubernetesServicePort | quote }}
{{- end }}
{{- end -}}

{{- define "landfall.gate" -}}
{{- $gate := .Values.speaker.gate | default (ternary "proxy" "none" .Values.proxy.enabled) -}}
{{- if and (eq $gate "proxy") (not .Values.proxy.enabled) -}}
{{- fail "speaker.gate=proxy needs proxy.enabled=true; with another service proxy set speaker.gate=none" -}}
{{- end -}}
{{- $gate -}}
{{- end -}}

{{/* Probes on the metrics port. Liveness: the process answers. Readiness: its first work is done. */}}
{{- define "landfall.probes" -}}
livenessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{- define "landfall.gossipSecret" -}}
{{- .Values.speaker.gossip.existingSecret | default (printf "%s-gossip" (include "landfall.fullname" .)) -}}
{{- end -}}
