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

{{/* The flag with addresses of the API server beside that of the Service default/kubernetes, which works only while a
service proxy runs: those of the value, or those that the Service has when helm installs or upgrades. */}}
{{- define "landfall.apiServersArg" -}}
{{- $servers := uniq .Values.apiServers -}}
{{- if not $servers -}}
{{- range (lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "").items | default list -}}
{{- if eq (dig "labels" "kubernetes.io/service-name" "" .metadata) "kubernetes" -}}
{{- $port := (first (.ports | default (list dict))).port | default 6443 -}}
{{- $bracket := eq .addressType "IPv6" -}}
{{- range .endpoints -}}
{{- range .addresses -}}
{{- $servers = append $servers (printf (ternary "[%s]:%d" "%s:%d" $bracket) . (int $port)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $servers = $servers | uniq | sortAlpha -}}
{{- end -}}
{{- with $servers }}
- --api-servers={{ join "," (slice . 0 (min 16 (len .))) }}
{{- end }}
{{- end -}}

{{/* The CIDR of the pod network: the value's, or the one that kubeadm has noted. */}}
{{- define "landfall.clusterCIDR" -}}
{{- $config := dig "data" "ClusterConfiguration" "" (lookup "v1" "ConfigMap" "kube-system" "kubeadm-config") | fromYaml -}}
{{- .Values.proxy.clusterCIDR | default (dig "networking" "podSubnet" "" $config) -}}
{{- end -}}

{{/* The flags by which the proxy tells connections of pods from others. */}}
{{- define "landfall.detectLocalArgs" -}}
{{- $cidr := include "landfall.clusterCIDR" . -}}
{{- with .Values.proxy -}}
{{- if and (eq .detectLocalMode "ClusterCIDR") (not $cidr) -}}
{{- fail "proxy.clusterCIDR is empty: set it to the CIDR of the pod network, such as 192.168.0.0/16, or choose another proxy.detectLocalMode" -}}
{{- end -}}
{{- if and (eq .detectLocalMode "BridgeInterface") (not .podBridgeInterface) -}}
{{- fail "proxy.podBridgeInterface is empty, and proxy.detectLocalMode=BridgeInterface needs it: set it to the bridge that pods are attached to, such as cni0" -}}
{{- end -}}
{{- if and (eq .detectLocalMode "InterfaceNamePrefix") (not .podInterfaceNamePrefix) -}}
{{- fail "proxy.podInterfaceNamePrefix is empty, and proxy.detectLocalMode=InterfaceNamePrefix needs it: set it to what the names of pods' interfaces begin with, such as cali" -}}
{{- end -}}
- --detect-local-mode={{ .detectLocalMode }}
- --cluster-cidr={{ $cidr }}
{{- with .podBridgeInterface }}
- --pod-bridge-interface={{ . }}
{{- end }}
{{- with .podInterfaceNamePrefix }}
- --pod-interface-name-prefix={{ . }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "landfall.gate" -}}
{{- $gate := .Values.speaker.gate | default (ternary "proxy" "none" .Values.proxy.enabled) -}}
{{- if and (eq $gate "proxy") (not .Values.proxy.enabled) -}}
{{- fail "speaker.gate=proxy needs proxy.enabled=true; with another service proxy set speaker.gate=none" -}}
{{- end -}}
{{- $gate -}}
{{- end -}}

{{/* Probes on the metrics port, of a container on the node's network or not. Liveness: all loops run. Readiness: the
first work is done. */}}
{{- define "landfall.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" .root.Values.metrics.secure -}}
{{- $host := ternary "127.0.0.1" "" (and .node (eq .root.Values.metrics.listen "localhost")) -}}
livenessProbe:
  httpGet: {path: /healthz, port: {{ .port }}, scheme: {{ $scheme }}{{ with $host }}, host: {{ . }}{{ end }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}, scheme: {{ $scheme }}{{ with $host }}, host: {{ . }}{{ end }}}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{/* Flags for the metrics port. */}}
{{- define "landfall.metricsArgs" -}}
{{- $listen := ternary .root.Values.metrics.listen "all" .node -}}
- --metrics-bind-address={{ ternary "" $listen (eq $listen "all") }}:{{ .port }}
- --metrics-secure={{ .root.Values.metrics.secure }}
{{- if and .root.Values.metrics.secure .root.Values.metrics.certSecret }}
- --metrics-cert-file=/run/secrets/landfall/metrics/tls.crt
- --metrics-key-file=/run/secrets/landfall/metrics/tls.key
{{- end }}
{{- end -}}

{{- define "landfall.metricsMount" -}}
{{- if and .Values.metrics.secure .Values.metrics.certSecret }}
- {name: metrics-certificate, mountPath: /run/secrets/landfall/metrics, readOnly: true}
{{- end }}
{{- end -}}

{{- define "landfall.metricsVolume" -}}
{{- if and .Values.metrics.secure .Values.metrics.certSecret }}
- name: metrics-certificate
  secret:
    secretName: {{ .Values.metrics.certSecret }}
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- end -}}

{{/* The Secret with the token by which Prometheus Operator's PodMonitors read metrics. */}}
{{- define "landfall.metricsToken" -}}
{{- .Values.podMonitor.tokenSecret | default (printf "%s-metrics-reader" (include "landfall.fullname" .)) -}}
{{- end -}}

{{/* The Secrets that BGPPeers in the cluster name and that speaker.bgpSecrets does not, as JSON; none without a
cluster. */}}
{{- define "landfall.bgpSecretsMissing" -}}
{{- $names := list -}}
{{- if and .Values.speaker.enabled .Values.rbac.create (.Capabilities.APIVersions.Has "landfall.dev/v1beta1/BGPPeer") -}}
{{- range (lookup "landfall.dev/v1beta1" "BGPPeer" "" "").items | default list -}}
{{- $secret := dig "passwordSecret" dict .spec -}}
{{- $ours := eq ($secret.namespace | default $.Release.Namespace) $.Release.Namespace -}}
{{- if and $secret.name $ours (not (has $secret.name $.Values.speaker.bgpSecrets)) -}}
{{- $names = append $names $secret.name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $names | uniq | sortAlpha | toJson -}}
{{- end -}}

{{/* What to set so that speakers read these Secrets too. */}}
{{- define "landfall.bgpSecretsSet" -}}
--set 'speaker.bgpSecrets={ {{- concat .root.Values.speaker.bgpSecrets .names | uniq | sortAlpha | join "," -}} }'
{{- end -}}

{{/* Fails an upgrade that would end BGP sessions, because it takes away Secrets that speakers may read now and that
BGPPeers name. */}}
{{- define "landfall.keepBGPSecrets" -}}
{{- $role := lookup "rbac.authorization.k8s.io/v1" "Role" .Release.Namespace (printf "%s-speaker" (include "landfall.fullname" .)) -}}
{{- $lost := list -}}
{{- $missing := include "landfall.bgpSecretsMissing" . | fromJsonArray -}}
{{- range $role.rules | default list -}}
{{- if has "secrets" (.resources | default list) -}}
{{- range .resourceNames | default list -}}
{{- if has . $missing -}}{{- $lost = append $lost . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $lost -}}
{{- fail (printf "speaker.bgpSecrets lacks %s: BGPPeers have their passwords there, and speakers may read them now; without them their sessions would end. Set %s, or remove spec.passwordSecret of those BGPPeers" (join ", " .) (include "landfall.bgpSecretsSet" (dict "root" $ "names" $missing))) -}}
{{- end -}}
{{- end -}}

{{- define "landfall.gossipSecret" -}}
{{- .Values.speaker.gossip.existingSecret | default (printf "%s-gossip" (include "landfall.fullname" .)) -}}
{{- end -}}

{{/* What Helm runs after it has deleted the rest, and deletes then. */}}
{{- define "landfall.cleanupHook" -}}
helm.sh/hook: post-delete
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
