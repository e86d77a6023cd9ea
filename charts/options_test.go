package charts

import (
	"encoding/json"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestSeparatePods has speaker and proxy in two DaemonSets, each with its own nodes.
func TestSeparatePods(t *testing.T) {
	t.Parallel()
	objects := render(t, "node.separatePods=true", `speaker.nodeSelector={"edge":"yes"}`, `speaker.tolerations=[]`,
		`node.affinity={"nodeAffinity":{}}`)
	if _, ok := objects["DaemonSet landfall-node"]; ok {
		t.Error("there is a third DaemonSet")
	}
	speaker := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-speaker").Spec
	proxy := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-proxy").Spec
	for name, spec := range map[string]appsv1.DaemonSetSpec{"speaker": speaker, "proxy": proxy} {
		pod := spec.Template.Spec
		if len(pod.Containers) != 1 || pod.Containers[0].Name != name || pod.ServiceAccountName != "landfall-node" ||
			spec.Selector.MatchLabels["app.kubernetes.io/component"] != name ||
			spec.Template.Labels["app.kubernetes.io/component"] != name || pod.Affinity == nil {
			t.Errorf("%s: %+v", name, spec)
		}
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "feed" })
		if feed := pod.Volumes[i].HostPath; feed == nil || feed.Path != "/run/landfall/landfall-system-landfall" {
			t.Errorf("%s: the feed is in %+v", name, pod.Volumes[i])
		}
	}
	if diff := cmp.Diff(map[string]string{"edge": "yes"}, speaker.Template.Spec.NodeSelector); diff != "" {
		t.Errorf("the speaker's nodes (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"kubernetes.io/os": "linux"}, proxy.Template.Spec.NodeSelector); diff != "" {
		t.Errorf("the proxy's nodes (-want +got):\n%s", diff)
	}
	if len(speaker.Template.Spec.Tolerations) != 0 || len(proxy.Template.Spec.Tolerations) != 1 {
		t.Errorf("tolerations: %v, %v", speaker.Template.Spec.Tolerations, proxy.Template.Spec.Tolerations)
	}
	for _, rule := range as[rbacv1.Role](t, objects, "Role landfall-speaker").Rules {
		if rule.Resources[0] == "daemonsets" && !slices.Equal(rule.ResourceNames, []string{"landfall-speaker"}) {
			t.Errorf("the speaker may watch %v, not its own DaemonSet", rule.ResourceNames)
		}
	}
	if !slices.Contains(speaker.Template.Spec.Containers[0].Args, "--daemonset=landfall-speaker") {
		t.Errorf("the speaker watches another DaemonSet: %v", speaker.Template.Spec.Containers[0].Args)
	}
	for _, set := range []string{`speaker.nodeSelector={"edge":"yes"}`, "proxy.tolerations=[]", "proxy.affinity={}"} {
		field, _, _ := strings.Cut(set, "=")
		if _, err := template(t, set); err == nil || !strings.Contains(err.Error(), field+" needs node.separatePods=true") {
			t.Errorf("%s in one pod: %v", set, err)
		}
	}
}

// TestServiceAccounts has all that names the ServiceAccounts follow their names.
func TestServiceAccounts(t *testing.T) {
	t.Parallel()
	objects := render(t, `controller.serviceAccount={"create":false,"name":"boss"}`,
		`node.serviceAccount={"name":"hands","annotations":{"example.com/a":"b"}}`, "podMonitor.enabled=true")
	if _, ok := objects["ServiceAccount boss"]; ok {
		t.Error("the controller's ServiceAccount is created all the same")
	}
	if as[corev1.ServiceAccount](t, objects, "ServiceAccount hands").Annotations["example.com/a"] != "b" {
		t.Error("the ServiceAccount lacks its annotation")
	}
	known := []string{"boss", "hands", "landfall-cleanup", "landfall-metrics-reader", "landfall-test"}
	var named []string
	for id, raw := range objects {
		var object struct{ Subjects []rbacv1.Subject }
		if err := json.Unmarshal(raw, &object); err != nil {
			t.Fatal(err)
		}
		for _, s := range object.Subjects {
			if named = append(named, s.Name); !slices.Contains(known, s.Name) {
				t.Errorf("%s binds %s", id, s.Name)
			}
		}
		if strings.HasPrefix(id, "ValidatingAdmissionPolicy ") && !strings.HasSuffix(id, "-service-conditions") &&
			!strings.Contains(string(raw), "system:serviceaccount:landfall-system:hands'") {
			t.Errorf("%s is for another ServiceAccount: %s", id, raw)
		}
	}
	slices.Sort(named)
	if diff := cmp.Diff(known, slices.Compact(named)); diff != "" {
		t.Errorf("bound ServiceAccounts (-want +got):\n%s", diff)
	}
	for _, set := range []string{`controller.serviceAccount.name="landfall-node"`, `node.serviceAccount.name="boss"`} {
		if _, err := template(t, `controller.serviceAccount.name="boss"`, set); err == nil ||
			!strings.Contains(err.Error(), "node.serviceAccount.name and controller.serviceAccount.name are both") {
			t.Errorf("one ServiceAccount for both (%s): %v", set, err)
		}
	}
	if name := as[appsv1.DaemonSet](t, objects,
		"DaemonSet landfall-node").Spec.Template.Spec.ServiceAccountName; name != "hands" {
		t.Errorf("the node's pod runs as %s", name)
	}
	if name := as[appsv1.Deployment](t, objects,
		"Deployment landfall-controller").Spec.Template.Spec.ServiceAccountName; name != "boss" {
		t.Errorf("the controller runs as %s", name)
	}
}

// TestNamesOfDigits has names that YAML takes for numbers, as Kubernetes lets them be.
func TestNamesOfDigits(t *testing.T) {
	t.Parallel()
	text, err := run(t, "template", "0123", "landfall", "--namespace", "landfall-system", "--kube-version", kubeVersion,
		"--set-json", clusterCIDR, "--set", "dashboards.enabled=true,relay.enabled=true,tracing.endpoint=http://c:4318",
		"--set-string", "nameOverride=0123,controller.serviceAccount.name=01,node.serviceAccount.name=02,"+
			"controller.priorityClassName=03,node.priorityClassName=04,metrics.certSecret=05,tracing.secret=06,"+
			"speaker.gossip.existingSecret=07,dashboards.namespace=08,proxy.serviceProxyName=09")
	if err != nil {
		t.Fatal(err)
	}
	codecs := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	decoded := 0
	for id, raw := range decode(t, text) {
		if strings.HasPrefix(id, "CustomResourceDefinition ") {
			continue
		}
		if _, _, err := codecs.Decode(raw, nil, nil); err != nil {
			t.Errorf("%s: %v", id, err)
		}
		decoded++
	}
	if decoded < 20 {
		t.Errorf("%d objects", decoded)
	}
}

// TestProbes sets one field of one probe; the others keep what they are.
func TestProbes(t *testing.T) {
	t.Parallel()
	objects := render(t, "probes.startup.failureThreshold=7", "controller.strategy={\"type\":\"Recreate\"}")
	controller := as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec
	if controller.Strategy.Type != appsv1.RecreateDeploymentStrategyType {
		t.Errorf("strategy %v", controller.Strategy)
	}
	node := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node").Spec.Template.Spec
	for _, c := range slices.Concat(node.Containers, controller.Template.Spec.Containers) {
		if p := c.StartupProbe; p.FailureThreshold != 7 || p.PeriodSeconds != 1 {
			t.Errorf("%s: startup probe %+v", c.Name, p)
		}
		if p := c.LivenessProbe; p.FailureThreshold != 6 || p.PeriodSeconds != 10 {
			t.Errorf("%s: liveness probe %+v", c.Name, p)
		}
	}
}

// Clients with enough addresses take all places of a port of metrics, and processes of a node those that the kubelet has
// there, so the kubelet must not restart a program because of that port. Each container has the socket on which it asks
// instead, in memory.
func TestContract11ProgramsLiveWhileTheirPortsAreFull(t *testing.T) {
	t.Parallel()
	for _, set := range [][]string{{}, {"node.separatePods=true"}, {"relay.ownPods=true"}} {
		objects := render(t, append(set, `metrics.certSecret="tls"`, "relay.enabled=true")...)
		programs := 0
		for id := range objects {
			var pod corev1.PodSpec
			switch kind, _, _ := strings.Cut(id, " "); kind {
			case "Deployment":
				pod = as[appsv1.Deployment](t, objects, id).Spec.Template.Spec
			case "DaemonSet":
				pod = as[appsv1.DaemonSet](t, objects, id).Spec.Template.Spec
			}
			for _, c := range pod.Containers {
				programs++
				asksOnItsOwnSocket(t, pod, c, "startup", c.StartupProbe)
				asksOnItsOwnSocket(t, pod, c, "liveness", c.LivenessProbe)
			}
		}
		if programs != 4 {
			t.Errorf("%v: %d programs, want 4", set, programs)
		}
	}
}

func asksOnItsOwnSocket(t *testing.T, pod corev1.PodSpec, c corev1.Container, name string, p *corev1.Probe) {
	t.Helper()
	if p.HTTPGet != nil || p.Exec == nil {
		t.Errorf("%s: the %s probe asks at the port: %+v", c.Name, name, p)
		return
	}
	argument, rest := len(c.Command), p.Exec.Command
	if len(rest) != argument+2 || !slices.Equal(rest[:argument], c.Command) || rest[argument] != "alive" ||
		!slices.Contains(c.Args, rest[argument+1]) {
		t.Errorf("%s: the %s probe runs %q; the arguments are %q", c.Name, name, rest, c.Args)
		return
	}
	folder := filepath.Dir(strings.TrimPrefix(rest[argument+1], "--probe-socket="))
	i := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == folder && !m.ReadOnly })
	if i < 0 {
		t.Errorf("%s: nothing is mounted at %s: %+v", c.Name, folder, c.VolumeMounts)
		return
	}
	if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool {
		return v.Name == c.VolumeMounts[i].Name && v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory
	}) {
		t.Errorf("%s: the volumes are %+v", c.Name, pod.Volumes)
	}
}

// TestProbesOff switches probes off.
func TestProbesOff(t *testing.T) {
	t.Parallel()
	objects := render(t, "probes.liveness=null", "probes.startup=null", "speaker.logLevel=null")
	node := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node").Spec.Template.Spec
	for _, c := range node.Containers {
		if c.LivenessProbe != nil || c.StartupProbe != nil || c.ReadinessProbe.HTTPGet.Path != "/readyz" {
			t.Errorf("%s has the probes %v, %v, %v", c.Name, c.StartupProbe, c.LivenessProbe, c.ReadinessProbe)
		}
	}
}

// TestNetworkPolicy lets the controller reach every port at which the values have API servers.
func TestNetworkPolicy(t *testing.T) {
	t.Parallel()
	objects := render(t, "networkPolicy.enabled=true", `networkPolicy.apiServerPorts=[8443]`,
		`apiServers=["10.0.0.1:7443","[2001:db8::1]:443"]`, `kubernetesServiceHost="api.example.org"`,
		"kubernetesServicePort=9443", `networkPolicy.metricsFrom=[{"namespaceSelector":{"matchLabels":{"a":"b"}}}]`)
	policy := as[networkingv1.NetworkPolicy](t, objects, "NetworkPolicy landfall-controller").Spec
	pod := as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec.Template
	for key, value := range policy.PodSelector.MatchLabels {
		if pod.Labels[key] != value {
			t.Errorf("the policy selects %s=%s, the pods have %v", key, value, pod.Labels)
		}
	}
	var ports []int
	for _, p := range policy.Egress[0].Ports {
		ports = append(ports, p.Port.IntValue())
	}
	if diff := cmp.Diff([]int{443, 6443, 8443, 9443, 7443, 53, 53}, ports); diff != "" {
		t.Errorf("egress (-want +got):\n%s", diff)
	}
	if in := policy.Ingress; len(in) != 1 || in[0].Ports[0].Port.IntValue() != 7480 || len(in[0].From) != 1 {
		t.Errorf("ingress: %+v", in)
	}
}

// TestDashboard gives a ServiceAccount the page and nothing else, and users a way to it.
func TestDashboard(t *testing.T) {
	t.Parallel()
	for id := range render(t) {
		if strings.HasSuffix(id, "-dashboard") || strings.HasSuffix(id, "-dashboard-user") {
			t.Errorf("%s although the dashboard is off", id)
		}
	}
	if _, err := template(t, "controller.dashboard.enabled=true", "metrics.secure=false"); err == nil ||
		!strings.Contains(err.Error(), "controller.dashboard.enabled needs metrics.secure=true") {
		t.Errorf("without metrics.secure: %v", err)
	}
	objects := render(t, "controller.dashboard.enabled=true", `controller.dashboard.users=[{"kind":"User","name":"ann"}]`,
		`rbac.operators=[{"kind":"Group","name":"ops"}]`)
	pod := as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec.Template
	account := as[corev1.ServiceAccount](t, objects, "ServiceAccount landfall-dashboard")
	if pod.Labels[lb.LabelDashboard] != account.Name || !slices.Contains(pod.Spec.Containers[0].Args, "--dashboard=true") {
		t.Errorf("the pod has labels %v and arguments %v", pod.Labels, pod.Spec.Containers[0].Args)
	}
	rules := as[rbacv1.ClusterRole](t, objects, "ClusterRole landfall-dashboard").Rules
	if diff := cmp.Diff([]rbacv1.PolicyRule{{NonResourceURLs: []string{"/dashboard"}, Verbs: []string{"get"}}}, rules); diff != "" {
		t.Errorf("the page's role (-want +got):\n%s", diff)
	}
	bound := 0
	for id, raw := range objects {
		if strings.Contains(string(raw), `"landfall-dashboard"`) && strings.Contains(id, "Binding") {
			bound++
		}
	}
	if bound != 1 {
		t.Errorf("the ServiceAccount is in %d bindings", bound)
	}
	user := as[rbacv1.Role](t, objects, "Role landfall-dashboard-user").Rules
	if last := user[len(user)-1]; len(last.ResourceNames) != 1 || last.ResourceNames[0] != account.Name ||
		last.Resources[0] != "serviceaccounts/token" {
		t.Errorf("users may get tokens: %+v", last)
	}
	if who := as[rbacv1.RoleBinding](t, objects, "RoleBinding landfall-dashboard-user").Subjects; len(who) != 2 ||
		who[0].Name != "ann" || who[1].Name != "ops" {
		t.Errorf("users: %v", who)
	}
}

// TestTracing tells all programs the collector, and lets the controller reach it.
func TestTracing(t *testing.T) {
	t.Parallel()
	for endpoint, port := range map[string]int{"http://collector.monitoring:4318": 4318, "https://collector/otlp": 443,
		"http://[2001:db8::1]": 80} {
		objects := render(t, "networkPolicy.enabled=true", `tracing.endpoint="`+endpoint+`"`)
		node := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node").Spec.Template.Spec
		controller := as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec.Template.Spec
		for _, c := range slices.Concat(node.Containers, controller.Containers) {
			if !slices.Contains(c.Args, "--otlp-endpoint="+endpoint) {
				t.Errorf("%s has the arguments %v", c.Name, c.Args)
			}
		}
		egress := as[networkingv1.NetworkPolicy](t, objects, "NetworkPolicy landfall-controller").Spec.Egress
		if got := egress[len(egress)-1].Ports[0].Port.IntValue(); got != port {
			t.Errorf("%s: the policy lets port %d out", endpoint, got)
		}
	}
	objects := render(t, `tracing.endpoint="https://collector"`, `tracing.secret="collector"`)
	for _, pod := range []corev1.PodSpec{as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node").Spec.Template.Spec,
		as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec.Template.Spec} {
		secret := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "tracing" })
		if secret < 0 || pod.Volumes[secret].Secret.SecretName != "collector" || !*pod.Volumes[secret].Secret.Optional {
			t.Errorf("the volumes are %+v", pod.Volumes)
		}
		for _, c := range pod.Containers {
			mount := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "tracing" })
			if mount < 0 || !slices.Contains(c.Args, "--otlp-secret-dir="+c.VolumeMounts[mount].MountPath) {
				t.Errorf("%s has the arguments %v, and mounts %v", c.Name, c.Args, c.VolumeMounts)
			}
		}
	}
	if _, err := template(t, `tracing.endpoint="collector:4317"`); err == nil {
		t.Error("an endpoint without a scheme")
	}
}

// TestExtraObjects are rendered as templates, from YAML or from text.
func TestExtraObjects(t *testing.T) {
	t.Parallel()
	objects := render(
		t, `extraObjects=[{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"{{ .Release.Name }}-a"}},`+
			`"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: b}"]`)
	for _, id := range []string{"ConfigMap landfall-a", "ConfigMap b"} {
		if _, ok := objects[id]; !ok {
			t.Errorf("no %s among %v", id, ids(objects))
		}
	}
}

// monitor is a PodMonitor or a ServiceMonitor, as far as the chart writes them.
type monitor struct {
	Spec struct {
		Selector                       struct{ MatchLabels map[string]string }
		PodMetricsEndpoints, Endpoints []struct {
			Port, Interval, ScrapeTimeout, Scheme string
			Relabelings, MetricRelabelings        []map[string]any
			Authorization                         struct{ Credentials struct{ Name, Key string } }
		}
	}
}

// TestMonitors checks that monitors of both kinds name ports and labels that are there.
func TestMonitors(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"podMonitor", "serviceMonitor"} {
		for _, separate := range []string{"false", "true"} {
			objects := render(t, kind+".enabled=true", kind+`.scrapeTimeout="5s"`,
				kind+`.relabelings=[{"targetLabel":"x"}]`, kind+`.metricRelabelings=[{"action":"drop"}]`,
				"node.separatePods="+separate)
			monitors := 0
			for id, raw := range objects {
				_, ok := strings.CutPrefix(id, strings.ToUpper(kind[:1])+kind[1:]+" ")
				if !ok {
					continue
				}
				monitors++
				var m monitor
				if err := json.Unmarshal(raw, &m); err != nil {
					t.Fatal(err)
				}
				ports := portsOf(t, objects, m.Spec.Selector.MatchLabels, kind == "serviceMonitor")
				endpoints := slices.Concat(m.Spec.PodMetricsEndpoints, m.Spec.Endpoints)
				if len(endpoints) != len(ports) {
					t.Errorf("%s asks %d ports of %v", id, len(endpoints), ports)
				}
				for _, e := range endpoints {
					if !slices.Contains(ports, e.Port) || e.ScrapeTimeout != "5s" || len(e.Relabelings) != 2 ||
						len(e.MetricRelabelings) != 1 || e.Scheme != "https" ||
						e.Authorization.Credentials.Name != "landfall-metrics-reader" {
						t.Errorf("%s: endpoint %+v, ports %v", id, e, ports)
					}
				}
			}
			if want := map[string]int{"false": 2, "true": 3}[separate]; monitors != want {
				t.Errorf("%s, separate pods %s: %d monitors, want %d", kind, separate, monitors, want)
			}
		}
	}
	if _, err := template(t, "podMonitor.enabled=true", "serviceMonitor.enabled=true"); err == nil ||
		!strings.Contains(err.Error(), "choose one") {
		t.Errorf("both kinds of monitors: %v", err)
	}
}

// portsOf returns the names of the ports with metrics of the pods with these labels, or of the
// Service with them.
func portsOf(t *testing.T, objects rendered, labels map[string]string, ofService bool) (names []string) {
	t.Helper()
	has := func(have map[string]string) bool {
		for key, value := range labels {
			if have[key] != value {
				return false
			}
		}
		return true
	}
	for id, raw := range objects {
		switch kind, _, _ := strings.Cut(id, " "); {
		case kind == "Service" && ofService:
			var s corev1.Service
			if err := yaml.UnmarshalStrict(raw, &s); err != nil {
				t.Fatal(err)
			}
			if !has(s.Labels) {
				continue
			}
			pods := portsOf(t, objects, s.Spec.Selector, false)
			for _, p := range s.Spec.Ports {
				if !slices.Contains(pods, p.TargetPort.StrVal) {
					t.Errorf("%s: port %s is none of %v", id, p.Name, pods)
				}
				names = append(names, p.Name)
			}
		case (kind == "DaemonSet" || kind == "Deployment") && !ofService:
			var o struct {
				Spec struct{ Template corev1.PodTemplateSpec }
			}
			if err := json.Unmarshal(raw, &o); err != nil {
				t.Fatal(err)
			}
			for _, c := range o.Spec.Template.Spec.Containers {
				for _, p := range c.Ports {
					if has(o.Spec.Template.Labels) && strings.HasSuffix(p.Name, "metrics") {
						names = append(names, p.Name)
					}
				}
			}
		}
	}
	return names
}

// alert is one rule of the PrometheusRule.
type alert struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func alerts(t *testing.T, set ...string) []alert {
	t.Helper()
	objects := render(t, append([]string{"prometheusRule.enabled=true"}, set...)...)
	rule := as[struct {
		APIVersion, Kind string
		Metadata         map[string]any
		Spec             struct {
			Groups []struct {
				Name  string
				Rules []alert
			}
		}
	}](t, objects, "PrometheusRule landfall")
	return rule.Spec.Groups[0].Rules
}

// TestAlerts checks the alerts' form, that values change them, and that the docs list them.
func TestAlerts(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../docs/guide/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	all := alerts(t)
	for _, a := range all {
		if !strings.HasPrefix(a.Alert, "Landfall") || a.Annotations["summary"] == "" || a.Annotations["description"] == "" ||
			a.Labels["severity"] != "warning" && a.Labels["severity"] != "critical" {
			t.Errorf("%+v", a)
		}
		if !strings.Contains(string(doc), "| `"+a.Alert+"` |") {
			t.Errorf("docs/guide/metrics.md does not list %s", a.Alert)
		}
	}
	changed := alerts(t, `prometheusRule.disabled=["LandfallVersionsDiffer"]`, `prometheusRule.alertLabels={"team":"net"}`,
		`prometheusRule.extraRules=[{"alert":"Mine","expr":"1"}]`)
	if len(changed) != len(all) || changed[len(changed)-1].Alert != "Mine" || changed[0].Labels["team"] != "net" {
		t.Errorf("%+v", changed)
	}
	if _, err := template(t, "prometheusRule.enabled=true", `prometheusRule.disabled=["LandfallNothing"]`); err == nil ||
		!strings.Contains(err.Error(), "there is no alert LandfallNothing, only LandfallControllerAbsent") {
		t.Errorf("an alert that is none: %v", err)
	}
}

// TestMetricsExist looks for each metric of alerts and dashboards in the programs' sources.
func TestMetricsExist(t *testing.T) {
	t.Parallel()
	queries := map[string]string{}
	for _, a := range alerts(t) {
		queries[a.Alert] = a.Expr
	}
	maps.Copy(queries, dashboards(t))
	known := metricNames(t)
	named := regexp.MustCompile(`\b(landfall|kubeproxy)_\w+`)
	for what, query := range queries {
		names := named.FindAllString(query, -1)
		if len(names) == 0 {
			t.Errorf("%s asks for no metric of Landfall: %s", what, query)
		}
		for _, name := range names {
			if !known(name) && !known(strings.TrimSuffix(name, "_bucket")) {
				t.Errorf("%s: no program has %s", what, name)
			}
		}
	}
	for _, no := range []string{"landfall_speaker_nothing", "landfall_proxy", "landfall_bgp_session"} {
		if known(no) {
			t.Errorf("the sources are said to have %s", no)
		}
	}
}

// metricNames reports whether a program has a metric: its name is a literal of the sources, or
// composed of literals of one package.
func metricNames(t *testing.T) func(name string) bool {
	t.Helper()
	literal := regexp.MustCompile(`"([a-z0-9_]+)"`)
	packages := map[string]map[string]bool{}
	for _, root := range []string{"../controller", "../speaker", "../proxy", "../internal"} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			folder := filepath.Dir(path)
			if packages[folder] == nil {
				packages[folder] = map[string]bool{}
			}
			for _, m := range literal.FindAllStringSubmatch(string(text), -1) {
				packages[folder][m[1]] = true
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return func(name string) bool {
		return slices.ContainsFunc(slices.Collect(maps.Values(packages)), func(literals map[string]bool) bool {
			return literals[name] || slices.ContainsFunc(slices.Collect(maps.Keys(literals)), func(prefix string) bool {
				return strings.HasPrefix(prefix, "landfall_") && strings.HasPrefix(name, prefix) &&
					composed(name[len(prefix):], literals)
			})
		})
	}
}

// composed reports whether a name is a literal, or literals that end in _ and one after them.
func composed(name string, literals map[string]bool) bool {
	for prefix := range literals {
		rest, ok := strings.CutPrefix(name, prefix)
		if ok && strings.HasSuffix(prefix, "_") && composed(rest, literals) {
			return true
		}
	}
	return literals[name]
}

// dashboards returns the queries of the dashboards, after a look at their form.
func dashboards(t *testing.T) map[string]string {
	t.Helper()
	objects := render(t, "dashboards.enabled=true", `dashboards.namespace="monitoring"`,
		`dashboards.annotations={"folder":"Net"}`)
	queries, found := map[string]string{}, 0
	for id := range objects {
		if !strings.HasPrefix(id, "ConfigMap landfall-dashboard-") {
			continue
		}
		found++
		object := as[corev1.ConfigMap](t, objects, id)
		if object.Labels["grafana_dashboard"] != "1" || object.Namespace != "monitoring" ||
			object.Annotations["folder"] != "Net" || len(object.Data) != 1 {
			t.Errorf("%s: %+v", id, object.ObjectMeta)
		}
		for file, text := range object.Data {
			checkDashboard(t, file, text, queries)
		}
	}
	if found < 2 {
		t.Errorf("%d dashboards", found)
	}
	return queries
}

func checkDashboard(t *testing.T, file, text string, queries map[string]string) {
	t.Helper()
	var d struct {
		UID, Title    string
		ID            *int
		SchemaVersion int
		Panels        []struct {
			ID         int
			Type       string
			Title      string
			GridPos    struct{ X, Y, W, H int }
			Datasource struct{ Type, UID string }
			Targets    []struct{ Expr string }
		}
		Templating struct {
			List []struct{ Name, Type, Definition string }
		}
	}
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if !strings.HasSuffix(file, ".json") || d.UID == "" || len(d.UID) > 40 || d.ID != nil || d.SchemaVersion == 0 {
		t.Errorf("%s: uid %q, id %v, schema %d", file, d.UID, d.ID, d.SchemaVersion)
	}
	for _, v := range d.Templating.List {
		if v.Type == "query" {
			queries[file+" variable "+v.Name] = v.Definition
		}
	}
	seen := map[int]bool{}
	for _, p := range d.Panels {
		if seen[p.ID] || p.Title == "" || p.GridPos.X+p.GridPos.W > 24 ||
			p.Type != "row" && (len(p.Targets) == 0 || p.Datasource.UID != "${datasource}") {
			t.Errorf("%s: panel %+v", file, p)
		}
		seen[p.ID] = true
		for _, target := range p.Targets {
			queries[file+" "+p.Title+" "+target.Expr] = target.Expr
		}
	}
}
