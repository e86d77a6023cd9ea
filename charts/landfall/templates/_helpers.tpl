{{/* Adds the values that an earlier version of the chart did not have, if helm upgrade --reuse-values brings the values of
one: each template begins with this. helm leaves out a value that is null, too: it has its default. Within what null can
take a part out of, such as a probe, parts are added only to values that lack a whole section. */}}
{{- define "landfall.defaults" -}}
{{- $defaults := .Files.Get "files/defaults.yaml" | fromYaml -}}
{{- $asGiven := list "probes" "resources" "labels" "tlsConfig" -}}
{{- range $section, $_ := $defaults -}}
{{- if not (hasKey $.Values $section) -}}{{- $asGiven = list -}}{{- end -}}
{{- end -}}
{{- include "landfall.fill" (dict "values" .Values "defaults" $defaults "asGiven" $asGiven) -}}
{{- end -}}

{{- define "landfall.fill" -}}
{{- range $key, $default := .defaults -}}
{{- $value := get $.values $key -}}
{{- if not (hasKey $.values $key) -}}
{{- $_ := set $.values $key $default -}}
{{- else if and (kindIs "map" $default) (kindIs "map" $value) (not (has $key $.asGiven)) -}}
{{- include "landfall.fill" (dict "values" $value "defaults" $default "asGiven" $.asGiven) -}}
{{- end -}}
{{- end -}}
{{- end -}}

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
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* A label selector of all pods but those of hooks. */}}
{{- define "landfall.podSelector" -}}
app.kubernetes.io/name={{ default .Chart.Name .Values.nameOverride }},app.kubernetes.io/instance={{ .Release.Name -}}
,app.kubernetes.io/component in (controller,node,proxy,relay,speaker)
{{- end -}}

{{- /* As one argument. */ -}}
{{- define "landfall.selectorText" -}}
app.kubernetes.io/name={{ default .Chart.Name .Values.nameOverride }},app.kubernetes.io/instance={{ .Release.Name }}
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

{{/* Addresses of the API server beside that of the Service default/kubernetes, which works only while a service proxy
runs, as JSON: those of the value, or those that the Service has when helm installs or upgrades. */}}
{{- define "landfall.apiServers" -}}
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
{{- slice $servers 0 (min 16 (len $servers)) | toJson -}}
{{- end -}}

{{- define "landfall.apiServersArg" -}}
{{- with include "landfall.apiServers" . | fromJsonArray }}
- --api-servers={{ join "," . }}
{{- end }}
{{- end -}}

{{/* The CIDR of the pod network: the value's, or the one that kubeadm has noted. */}}
{{- define "landfall.clusterCIDR" -}}
{{- $config := dig "data" "ClusterConfiguration" "" (lookup "v1" "ConfigMap" "kube-system" "kubeadm-config") | fromYaml -}}
{{- .Values.proxy.clusterCIDR | default (dig "networking" "podSubnet" "" $config) -}}
{{- end -}}

{{/* The networks of cluster IPs that no ServiceCIDR shows: the value's, or those that kubeadm has noted. */}}
{{- define "landfall.serviceCIDR" -}}
{{- $found := "" -}}
{{- if semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version -}}
{{- $config := dig "data" "ClusterConfiguration" "" (lookup "v1" "ConfigMap" "kube-system" "kubeadm-config") | fromYaml -}}
{{- $found = dig "networking" "serviceSubnet" "" $config -}}
{{- end -}}
{{- .Values.proxy.serviceCIDR | default $found -}}
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
{{- if and .acceptForwarded (ne .detectLocalMode "ClusterCIDR") -}}
{{- fail "proxy.acceptForwarded needs proxy.detectLocalMode=ClusterCIDR, as it accepts connections of the network in proxy.clusterCIDR" -}}
{{- end -}}
{{- if and .flowOffload (ne (.serviceCounters | default "off") "off") -}}
{{- fail "proxy.flowOffload needs proxy.serviceCounters=off: no rule could count the packets of offloaded flows" -}}
{{- end -}}
- --detect-local-mode={{ .detectLocalMode }}
- --cluster-cidr={{ $cidr }}
{{- with .podBridgeInterface }}
- {{ printf "--pod-bridge-interface=%s" . | quote }}
{{- end }}
{{- with .podInterfaceNamePrefix }}
- {{ printf "--pod-interface-name-prefix=%s" . | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* A time such as 1m30s in milliseconds. */}}
{{- define "landfall.milliseconds" -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9.]+[a-z]+" . -1 -}}
{{- $unit := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 | dig (regexFind "[a-z]+$" .) 0 -}}
{{- $sum = addf $sum (mulf (regexFind "^[0-9.]+" . | float64) $unit) -}}
{{- end -}}
{{- int $sum -}}
{{- end -}}

{{/* Fails where values contradict one another. */}}
{{- define "landfall.nodeChecks" -}}
{{- $v := .Values -}}
{{- if and $v.relay.enabled (not $v.proxy.enabled) -}}
{{- fail "relay.enabled needs proxy.enabled=true: rules of the proxy lead connections to the relay" -}}
{{- end -}}
{{- if and $v.relay.enabled $v.relay.ownPods $v.podMonitor.enabled -}}
{{- fail "relay.ownPods has no PodMonitor, which needs a port that the pod lists: use serviceMonitor.enabled" -}}
{{- end -}}
{{- $ports := dict -}}
{{- range list
  (list $v.proxy.enabled "TCP" "proxy.metricsPort" $v.proxy.metricsPort)
  (list (and $v.proxy.enabled $v.proxy.healthzBindAddress) "TCP" "proxy.healthzBindAddress" ($v.proxy.healthzBindAddress | default "" | regexFind "[0-9]+$"))
  (list (and $v.proxy.enabled $v.proxy.rescue $v.proxy.rescueRing $v.proxy.rescueTunnelPort) "UDP" "proxy.rescueTunnelPort" $v.proxy.rescueTunnelPort)
  (list $v.speaker.enabled "TCP" "speaker.metricsPort" $v.speaker.metricsPort)
  (list $v.speaker.enabled "TCP" "speaker.bindPort" $v.speaker.bindPort)
  (list $v.speaker.enabled "UDP" "speaker.bindPort" $v.speaker.bindPort)
  (list (and $v.speaker.enabled $v.speaker.bgpListen) "TCP" "speaker.bgpListen" ($v.speaker.bgpListen | default "" | regexFind "[0-9]+$"))
  (list $v.relay.enabled "TCP" "relay.metricsPort" $v.relay.metricsPort)
  (list $v.relay.enabled "TCP" "relay.port" $v.relay.port)
  (list $v.relay.enabled "UDP" "relay.port" $v.relay.port) -}}
{{- if first . -}}
{{- $name := index . 2 -}}
{{- $port := printf "%s port %d" (index . 1) (index . 3 | int) -}}
{{- if hasKey $ports $port -}}
{{- fail (printf "%s and %s are both %s: they are on the network of the node, and each needs a port of its own" (get $ports $port) $name $port) -}}
{{- end -}}
{{- $_ := set $ports $port $name -}}
{{- end -}}
{{- end -}}
{{- $needs := dict -}}
{{- if $v.speaker.enabled -}}
{{- $_ := set $needs "speaker.bgpConvergence plus 7 s" (include "landfall.milliseconds" $v.speaker.bgpConvergence | int | add 7000) -}}
{{- end -}}
{{- if $v.relay.enabled -}}
{{- $_ := set $needs "relay.drainTime plus 5 s" (include "landfall.milliseconds" $v.relay.drainTime | int | add 5000) -}}
{{- end -}}
{{- range $what, $milliseconds := $needs -}}
{{- if gt (int $milliseconds) (int (mul 1000 $v.node.terminationGracePeriodSeconds)) -}}
{{- fail (printf "node.terminationGracePeriodSeconds is %v, shorter than %s: the kubelet would kill the program before it is done" $v.node.terminationGracePeriodSeconds $what) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "landfall.gate" -}}
{{- $gate := .Values.speaker.gate | default (ternary "proxy" "none" .Values.proxy.enabled) -}}
{{- if and (eq $gate "proxy") (not .Values.proxy.enabled) -}}
{{- fail "speaker.gate=proxy needs proxy.enabled=true; with another service proxy set speaker.gate=none" -}}
{{- end -}}
{{- $gate -}}
{{- end -}}

{{/* Names of the ServiceAccounts. */}}
{{- define "landfall.controllerAccount" -}}
{{- .Values.controller.serviceAccount.name | default (printf "%s-controller" (include "landfall.fullname" .)) -}}
{{- end -}}

{{- define "landfall.nodeAccount" -}}
{{- $name := .Values.node.serviceAccount.name | default (printf "%s-node" (include "landfall.fullname" .)) -}}
{{- if eq $name (include "landfall.controllerAccount" .) -}}
{{- fail (printf "node.serviceAccount.name and controller.serviceAccount.name are both %s: each needs its own, or nodes may do what only the controller may" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Probes of a container on the node's network or not. Startup: the program serves. Liveness: all loops run. alive is the
command that asks for these, and not at the metrics port: clients with many addresses can take all places there, and on
the network of a node its processes those of the kubelet, which would restart the container. Readiness, which ends
nothing: the first work is done. It is asked for at the port, or with the command ready. */}}
{{- define "landfall.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" .root.Values.metrics.secure -}}
{{- $host := ternary "127.0.0.1" "" (and .node (eq .root.Values.metrics.listen "localhost")) -}}
{{- range $probe := list "liveness" "readiness" "startup" }}
{{- with get $.root.Values.probes $probe }}
{{ $probe }}Probe:
  {{- with ternary $.ready $.alive (eq $probe "readiness") }}
  exec: {command: {{ toJson . }}}
  {{- else }}
  httpGet: {path: /readyz, port: {{ $.port }}, scheme: {{ $scheme }}{{ with $host }}, host: {{ . }}{{ end }}}
  {{- end }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
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

{{- define "landfall.tracingArgs" -}}
{{- with .Values.tracing.endpoint }}
- --otlp-endpoint={{ . }}
{{- if $.Values.tracing.secret }}
- --otlp-secret-dir=/run/secrets/landfall/tracing
{{- end }}
{{- end }}
{{- end -}}

{{/* What all programs mount. */}}
{{- define "landfall.mounts" -}}
{{- if and .Values.metrics.secure .Values.metrics.certSecret }}
- {name: metrics-certificate, mountPath: /run/secrets/landfall/metrics, readOnly: true}
{{- end }}
{{- if and .Values.tracing.endpoint .Values.tracing.secret }}
- {name: tracing, mountPath: /run/secrets/landfall/tracing, readOnly: true}
{{- end }}
{{- end -}}

{{- define "landfall.volumes" -}}
{{- if and .Values.metrics.secure .Values.metrics.certSecret }}
- name: metrics-certificate
  secret:
    secretName: {{ .Values.metrics.certSecret | quote }}
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- if and .Values.tracing.endpoint .Values.tracing.secret }}
# No pod waits for what only traces need.
- name: tracing
  secret: {secretName: {{ .Values.tracing.secret | quote }}, optional: true}
{{- end }}
{{- end -}}

{{/* The values of the monitors that are enabled: PodMonitors or ServiceMonitors. */}}
{{- define "landfall.monitor" -}}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled -}}
{{- fail "podMonitor.enabled and serviceMonitor.enabled: choose one, or Prometheus scrapes every pod twice" -}}
{{- end -}}
{{- $kind := ternary "serviceMonitor" "podMonitor" .Values.serviceMonitor.enabled -}}
{{- if eq .Values.metrics.listen "localhost" -}}
{{- fail (printf "%s.enabled needs metrics.listen=node or all: Prometheus cannot reach the localhost of a node" $kind) -}}
{{- end -}}
{{- toYaml (index .Values $kind) -}}
{{- end -}}

{{/* The ports with metrics, by component of the pods, as YAML. */}}
{{- define "landfall.metricsPorts" -}}
controller: [{name: metrics, port: {{ .Values.controller.metricsPort }}}]
{{- range $set := include "landfall.nodeSets" . | fromYamlArray }}
{{ $set.component }}:
  {{- range $program := $set.programs }}
  - {name: {{ $program }}-metrics, port: {{ (index $.Values $program).metricsPort }}}
  {{- end }}
{{- end }}
{{- end -}}

{{/* One endpoint of a PodMonitor or ServiceMonitor. */}}
{{- define "landfall.metricsEndpoint" -}}
{{- $monitor := include "landfall.monitor" .root | fromYaml -}}
- port: {{ .port }}
  interval: {{ $monitor.interval }}
  {{- with $monitor.scrapeTimeout }}
  scrapeTimeout: {{ . }}
  {{- end }}
  {{- if .root.Values.metrics.secure }}
  scheme: https
  tlsConfig:
    {{- toYaml $monitor.tlsConfig | nindent 4 }}
  authorization:
    credentials:
      name: {{ $monitor.tokenSecret | default (printf "%s-metrics-reader" (include "landfall.fullname" .root)) | quote }}
      key: token
  {{- end }}
  relabelings:
    - sourceLabels: [__meta_kubernetes_pod_node_name]
      targetLabel: node
    {{- with $monitor.relabelings }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $monitor.metricRelabelings }}
  metricRelabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* The DaemonSets, as YAML: one with speaker and proxy in one pod, or one of each. The relay is in the pod of the proxy,
or has one of its own. */}}
{{- define "landfall.nodeSets" -}}
{{- $programs := list -}}
{{- range list "proxy" "speaker" -}}
{{- if (index $.Values .).enabled -}}{{- $programs = append $programs (list .) -}}{{- end -}}
{{- if and (eq . "proxy") $.Values.relay.enabled (not $.Values.relay.ownPods) -}}
{{- $programs = list (list "proxy" "relay") -}}
{{- end -}}
{{- end -}}
{{- $sets := list -}}
{{- if .Values.node.separatePods -}}
{{- range $programs -}}
{{- $sets = append $sets (dict "component" (first .) "programs" .) -}}
{{- end -}}
{{- else if $programs -}}
{{- $all := list -}}
{{- range $programs -}}{{- $all = concat $all . -}}{{- end -}}
{{- $sets = append $sets (dict "component" "node" "programs" $all) -}}
{{- end -}}
{{- if and .Values.relay.enabled .Values.relay.ownPods -}}
{{- $sets = append $sets (dict "component" "relay" "programs" (list "relay")) -}}
{{- end -}}
{{- toYaml $sets -}}
{{- end -}}

{{/* How pods of the relay alone are replaced: on as many nodes at once as node.updateStrategy has. The next relay of a
node takes over from the one before, so both run for a moment. */}}
{{- define "landfall.relayUpdateStrategy" -}}
{{- $strategy := .Values.node.updateStrategy | default dict -}}
{{- $type := $strategy.type | default "RollingUpdate" -}}
type: {{ $type }}
{{- if eq $type "RollingUpdate" }}
{{- $rolling := $strategy.rollingUpdate | default dict }}
{{- $nodes := list -}}
{{- range list "maxSurge" "maxUnavailable" }}
{{- $n := get $rolling . -}}
{{- if not (has (toString $n) (list "" "0" "0%")) }}{{ $nodes = append $nodes $n }}{{ end -}}
{{- end }}
rollingUpdate: {maxSurge: {{ append $nodes 1 | first | toJson }}, maxUnavailable: 0}
{{- end }}
{{- end -}}

{{/* The names of the DaemonSet that runs the proxy, with either value of node.separatePods, as JSON. */}}
{{- define "landfall.proxySets" -}}
{{- $full := include "landfall.fullname" . -}}
{{- list (printf "%s-node" $full) (printf "%s-proxy" $full) | toJson -}}
{{- end -}}

{{/* Fails an upgrade that would rename the DaemonSet of the proxy: helm would delete the old one, as when it uninstalls,
and its proxies would remove all rules from their nodes. */}}
{{- define "landfall.keepNames" -}}
{{- if .Release.IsUpgrade -}}
{{- $names := include "landfall.proxySets" . | fromJsonArray -}}
{{- range (lookup "apps/v1" "DaemonSet" .Release.Namespace "").items | default list -}}
{{- $ours := eq $.Release.Name (dig "annotations" "meta.helm.sh/release-name" "" .metadata) -}}
{{- $component := dig "labels" "app.kubernetes.io/component" "" .metadata -}}
{{- if and $ours (has $component (list "node" "proxy")) (not (has .metadata.name $names)) -}}
{{- $new := printf "%s-%s" (include "landfall.fullname" $) $component -}}
{{- fail (printf "nameOverride or fullnameOverride renames DaemonSet %s to %s: its proxies would remove their rules from the nodes before those of %s begin. Keep the name, with --set fullnameOverride=%s, or delete the old DaemonSet without its pods first, upgrade, and then delete the old pods node by node: kubectl -n %s delete daemonset %s --cascade=orphan" .metadata.name $new $new (trimSuffix (printf "-%s" $component) .metadata.name) $.Release.Namespace .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Says that an upgrade takes the proxy from the pods, and that its rules stay on the nodes. */}}
{{- define "landfall.proxyLeaves" -}}
{{- $cleans := and .Values.cleanup.enabled (or .Values.node.separatePods (not .Values.speaker.enabled)) -}}
{{- if and .Release.IsUpgrade (not .Values.proxy.enabled) (not $cleans) -}}
{{- range (lookup "apps/v1" "DaemonSet" .Release.Namespace "").items | default list -}}
{{- if eq $.Release.Name (dig "annotations" "meta.helm.sh/release-name" "" .metadata) -}}
{{- range dig "template" "spec" "containers" list .spec -}}
{{- if eq .name "proxy" }}yes{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails an upgrade that changes the class while Landfall announces Services of the class before: it would withdraw their
addresses, and the class of a Service cannot be changed. */}}
{{- define "landfall.keepClass" -}}
{{- $name := printf "%s-controller" (include "landfall.fullname" .) -}}
{{- $now := .Values.loadBalancerClass -}}
{{- if and .Release.IsUpgrade (not .Values.changeLoadBalancerClass) -}}
{{- range dig "spec" "template" "spec" "containers" list (lookup "apps/v1" "Deployment" .Release.Namespace $name) -}}
{{- range .args | default list -}}
{{- if and (hasPrefix "--load-balancer-class=" .) (ne . (printf "--load-balancer-class=%s" $now)) -}}
{{- $before := trimPrefix "--load-balancer-class=" . -}}
{{- $lost := list -}}
{{- range (lookup "v1" "Service" "" "").items | default list -}}
{{- $class := dig "spec" "loadBalancerClass" "" . -}}
{{- $service := printf "%s/%s" .metadata.namespace .metadata.name -}}
{{- range dig "status" "conditions" list . | default list -}}
{{- if and (eq .type "landfall.dev/Announced") (eq .status "True") (eq $class $before) -}}
{{- $lost = append $lost $service -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $lost -}}
{{- fail (printf "loadBalancerClass changes from %q to %q, and Landfall would withdraw the addresses of %d Service%s, such as %s: the class of a Service cannot be changed. Keep it, with --set loadBalancerClass=%s, or give up their addresses, with --set changeLoadBalancerClass=true" $before $now (len .) (ternary "" "s" (eq (len .) 1)) (first .) $before) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Where a program's pods run: a field of speaker or proxy, or that of node. */}}
{{- define "landfall.placement" -}}
{{- $root := .root -}}
{{- $field := .field -}}
{{- $value := index $root.Values.node $field -}}
{{- range list "proxy" "speaker" -}}
{{- $own := index $root.Values . $field -}}
{{- if kindIs "invalid" $own -}}
{{- else if not $root.Values.node.separatePods -}}
{{- fail (printf "%s.%s needs node.separatePods=true: speaker and proxy share a pod otherwise, and node.%s places both" . $field $field) -}}
{{- else if eq . $.component -}}
{{- $value = $own -}}
{{- end -}}
{{- end -}}
{{- with $value }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end -}}
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

{{/* Says that every Node in the cluster has the label that keeps it from announcing; nothing if one has not. */}}
{{- define "landfall.excluded" -}}
{{- $label := "node.kubernetes.io/exclude-from-external-load-balancers" -}}
{{- $free := false -}}
{{- $nodes := (lookup "v1" "Node" "" "").items | default list -}}
{{- range $nodes -}}
{{- if not (hasKey (.metadata.labels | default dict) $label) -}}{{- $free = true -}}{{- end -}}
{{- end -}}
{{- if and $nodes (not $free) .Values.speaker.enabled (not .Values.speaker.ignoreExcludeLB) -}}
{{ if eq (len $nodes) 1 }}The only node{{ else }}Every node{{ end }} of the cluster has the label {{ $label }}.
{{- end -}}
{{- end -}}

{{/* Other load balancers whose pods are in the cluster, as YAML. */}}
{{- define "landfall.rivals" -}}
{{- $found := list -}}
{{- if not .Values.loadBalancerClass -}}
{{- range (lookup "apps/v1" "DaemonSet" "" "").items | default list -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $name := printf "DaemonSet %s/%s" .metadata.namespace .metadata.name -}}
{{- if hasKey $labels "svccontroller.k3s.cattle.io/svcname" -}}
{{- $found = append $found (printf "ServiceLB of k3s (%s)" $name) -}}
{{- else if has "metallb" (list (index $labels "app") (index $labels "app.kubernetes.io/name")) -}}
{{- $found = append $found (printf "MetalLB (%s)" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- define "landfall.gossipSecret" -}}
{{- .Values.speaker.gossip.existingSecret | default (printf "%s-gossip" (include "landfall.fullname" .)) -}}
{{- end -}}

{{/*
The gossip key as the Secret has it. Where there is none yet, as at the first install, it is a new one, and the same in
all templates, so that the first upgrade finds the same checksum. Empty if another Secret cannot be read.
*/}}
{{- define "landfall.gossipKey" -}}
{{- $gossip := .Values.speaker.gossip -}}
{{- $key := lookup "v1" "Secret" .Release.Namespace (include "landfall.gossipSecret" .) | dig "data" "key" "" -}}
{{- if and (not $key) (not $gossip.existingSecret) -}}
{{- if not (hasKey $gossip "created") -}}{{- $_ := set $gossip "created" (randBytes 32 | b64enc) -}}{{- end -}}
{{- $key = $gossip.created -}}
{{- end -}}
{{- $key -}}
{{- end -}}

{{/* What Helm runs after it has deleted the rest, and deletes then. */}}
{{- /* A test that fails leaves its pod, with its log, until the next one. */ -}}
{{- define "landfall.testHook" -}}
helm.sh/hook: test
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{- define "landfall.cleanupHook" -}}
helm.sh/hook: post-delete
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* The node that a request comes from, for the policies of nodes, and that there is one. */}}
{{- define "landfall.policyNode" -}}
- name: node
  expression: >-
    'authentication.kubernetes.io/node-name' in request.userInfo.extra ?
    request.userInfo.extra['authentication.kubernetes.io/node-name'][0] : ''
{{- end -}}

{{- define "landfall.policyNeedsNode" -}}
- expression: variables.node != ''
  message: >-
    the token names no node; use the token of a pod on it, or switch off nodePolicies.enabled in the chart
{{- end -}}

{{- /* Each manager that applies takes room for good. The programs patch. */ -}}
{{- define "landfall.policyAppliers" -}}
- expression: >-
    object.metadata.?managedFields.orValue([]).filter(m, m.operation == 'Apply').size() <=
    oldObject.metadata.?managedFields.orValue([]).filter(m, m.operation == 'Apply').size()
  message: a node may not apply a {{ . }} under names of its choice
{{- end -}}

{{- /* No field bounds how many managers and fields a write names, and they stay with the object, which all share. */ -}}
{{- define "landfall.policyManagers" -}}
- expression: >-
    size('%s'.format([object.metadata.?managedFields.orValue([])])) <= {{ .room }} || oldObject != null &&
    size('%s'.format([object.metadata.?managedFields.orValue([])])) <=
    size('%s'.format([oldObject.metadata.?managedFields.orValue([])]))
  message: a node may not fill metadata.managedFields
{{- end -}}
