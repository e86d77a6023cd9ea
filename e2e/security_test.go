package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestContract11WhoMayAskAndWrite checks with the chart's defaults and a real API server who may
// read metrics and status, and what the ServiceAccount of a node can write.
func TestContract11WhoMayAskAndWrite(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	waitAnnounced(t, l, "my-nginx", seedVIP.Addr().String())
	t.Run("metrics", func(t *testing.T) { metricsAreForReaders(t, l) })
	t.Run("status", func(t *testing.T) { statusIsForThePod(t, l) })
	t.Run("conditions of Services", func(t *testing.T) { conditionsAreLandfalls(t, l) })
	t.Run("Events about Nodes", func(t *testing.T) { eventsAreOfTheirNode(t, l) })
	t.Run("writes of a node", func(t *testing.T) { nodesWriteTheirOwn(t, l) })
	t.Run("what a node says of its networks", func(t *testing.T) { nodesStopNoAssignment(t, l) })
}

// nodesStopNoAssignment has a node without a speaker, which would mend it, report gateways in the way of whoever has
// taken it over, where no policy bounds the text.
func nodesStopNoAssignment(t *testing.T, l *lab.Lab) {
	const node = "taken-over"
	if _, err := l.Kube().CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	says := func(text string) {
		t.Helper()
		if _, err := l.Kube().CoreV1().ConfigMaps(lab.Namespace).Patch(t.Context(), "landfall-surroundings",
			types.MergePatchType, fmt.Appendf(nil, `{"data":{%q:%q}}`, node, text), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	says("172.26.236.199 " + strings.Repeat("x", 40_000))
	wantPool(t, l, "vmware", "True", "Ready", "172.26.236.199 (an address of the network of node "+node+")")
	var many strings.Builder
	for i := range 200 {
		fmt.Fprintf(&many, "10.0.0.%d the gateway\n", i)
	}
	says(many.String() + "172.26.236.181 the gateway\n")
	createService(t, l, "beside", nil)
	wantAddresses(t, l, "beside", "172.26.236.181")
}

// conditionsAreLandfalls has a tenant who may write services/status of its namespace try to forge
// what Landfall says.
func conditionsAreLandfalls(t *testing.T, l *lab.Lab) {
	const namespace = "default"
	token := tokenOf(t, l, "tenant")
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "status-writer"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"services/status"}, Verbs: []string{"patch", "update"}}}}
	binding := &rbacv1.RoleBinding{ObjectMeta: role.ObjectMeta,
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "tenant", Namespace: namespace}}}
	if _, err := l.Kube().RbacV1().Roles(namespace).Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Kube().RbacV1().RoleBindings(namespace).Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	tenant, err := l.KubeWithToken(token)
	if err != nil {
		t.Fatal(err)
	}
	condition := func(conditionType string) string {
		return fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"status":"True","reason":"Forged","message":"x",`+
			`"lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`, conditionType)
	}
	for _, test := range []struct{ what, body, refusal string }{
		{"another's condition", condition("example.com/X"), ""},
		{"what it holds", condition("landfall.dev/Assigned"), "may update ipaddresspools/status"},
		{"who announces it", condition("landfall.dev/Announced"), "may patch bgppeers/status"},
		{"a condition that Landfall does not have yet", condition("landfall.dev/New"), "may patch bgppeers/status"},
		{"another's condition beside Landfall's", condition("example.com/Y"), ""},
		{"no condition", `{"status":{"conditions":[{"type":"landfall.dev/Assigned","$patch":"delete"}]}}`, ""},
	} {
		t.Run(test.what, func(t *testing.T) {
			eventually(t, "the API server knows the role and the policy", func() error {
				err := tenant.CoreV1().RESTClient().Patch(types.StrategicMergePatchType).
					AbsPath("/api/v1/namespaces/default/services/my-nginx/status").Body([]byte(test.body)).Do(t.Context()).Error()
				return refused(err, test.refusal)
			})
		})
	}
	eventually(t, "the controller writes its condition again", func() error {
		s, err := l.Kube().CoreV1().Services(namespace).Get(t.Context(), "my-nginx", metav1.GetOptions{})
		if err == nil && !meta.IsStatusConditionTrue(s.Status.Conditions, "landfall.dev/Assigned") {
			err = fmt.Errorf("%v", s.Status.Conditions)
		}
		return err
	})
}

// metricsPorts are the ports of the programs.
var metricsPorts = map[string]string{"controller": "7480", "speaker": "7481", "proxy": "7482", "relay": "7483"}

func metricsAreForReaders(t *testing.T, l *lab.Lab) {
	node := l.Cluster().Nodes[1]
	stranger, reader := tokenOf(t, l, "stranger"), tokenOf(t, l, "reader")
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole",
			Name: "landfall-metrics-reader"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "reader", Namespace: "default"}},
	}
	if _, err := l.Kube().RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"speaker", "proxy"} {
		at := net.JoinHostPort(node.Addr.String(), metricsPorts[program])
		for _, test := range []struct {
			path, token string
			code        int
			text        string
		}{
			{"/healthz", "", 200, "ok"},
			{"/readyz", "", 200, "ok"},
			{"/metrics", "", 401, "bearer token"},
			{"/metrics", "nonsense", 401, "does not accept the token"},
			{"/metrics", stranger, 403, `user "system:serviceaccount:default:stranger" may not get /metrics`},
			{"/metrics", reader, 200, "landfall_build_info"},
			{"/v1/status", reader, 404, ""},
		} {
			eventually(t, fmt.Sprintf("%s of the %s answers %d", test.path, program, test.code), func() error {
				code, body, err := getWithToken(t.Context(), l, lab.ClientName, "https://"+at+test.path, test.token)
				if err == nil && (code != test.code || !strings.Contains(body, test.text)) {
					err = fmt.Errorf("%d %s", code, body)
				}
				return err
			})
		}
		if code, body, err := l.Get(t.Context(), lab.ClientName, "http://"+at+"/metrics"); err == nil && code == 200 {
			t.Errorf("the %s serves metrics without TLS: %s", program, body)
		}
		// The node's other addresses serve nothing.
		for _, other := range []string{"127.0.0.1", seedVIP.Addr().String()} {
			conn, err := l.Dial(t.Context(), node.Name, "tcp", net.JoinHostPort(other, metricsPorts[program]))
			if err == nil {
				conn.Close()
				t.Errorf("the %s listens at %s", program, other)
			}
		}
	}
}

// tokenOf returns a token of a new ServiceAccount.
func tokenOf(t *testing.T, l *lab.Lab, name string) string {
	t.Helper()
	accounts := l.Kube().CoreV1().ServiceAccounts("default")
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := accounts.Create(t.Context(), account, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token, err := accounts.CreateToken(t.Context(), name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return token.Status.Token
}

func getWithToken(ctx context.Context, l *lab.Lab, host, url, token string) (code int, body string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := l.HTTPClient(host).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// statusIsForThePod runs what an administrator runs with "kubectl exec".
func statusIsForThePod(t *testing.T, l *lab.Lab) {
	for program, field := range map[string]string{"speaker": "vips", "proxy": "services"} {
		text, err := l.Agent(program, l.Cluster().Nodes[1].Name).Run(t.Context(), "status")
		var status map[string]any
		if err == nil {
			err = json.Unmarshal([]byte(text), &status)
		}
		if list, ok := status[field].([]any); err != nil || !ok || len(list) == 0 || status["node"] == "" {
			t.Errorf("landfall-%s status: %v\n%s", program, err, text)
		}
	}
}

// eventsAreOfTheirNode has a node that was taken over, and a stranger who may write Events, try to forge what
// the programs of other nodes report.
func eventsAreOfTheirNode(t *testing.T, l *lab.Lab) {
	self, other := l.Cluster().Nodes[1].Name, l.Cluster().Nodes[2].Name
	clients := map[string]kubernetes.Interface{}
	for _, name := range []string{self, other} {
		client, err := l.KubeAs(l.Agent("speaker", name))
		if err != nil {
			t.Fatal(err)
		}
		clients[name] = client
	}
	clients["stranger"] = eventWriter(t, l)
	event := func(about, by, on string) *corev1.Event {
		return &corev1.Event{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-", Namespace: "default"},
			InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: about, Namespace: "default"},
			Source:         corev1.EventSource{Component: by, Host: on}, ReportingController: by, ReportingInstance: on,
			Type: corev1.EventTypeWarning, Reason: "ForwardingOff", Message: "made up"}
	}
	half := event(self, "landfall-speaker", self)
	half.ReportingController = "kubelet"
	long, longest := event(self, "landfall-speaker", self), event(self, "landfall-speaker", self)
	long.Message, longest.Message = strings.Repeat("é", 1025), strings.Repeat("é", 1024)
	longReason := event(self, "landfall-speaker", self)
	longReason.Reason = strings.Repeat("x", 129)
	ofService := event("my-nginx", "landfall-speaker", self)
	ofService.InvolvedObject.Kind = "Service"
	create := func(e *corev1.Event) func(kubernetes.Interface) error {
		return func(k kubernetes.Interface) error {
			_, err := k.CoreV1().Events("default").Create(t.Context(), e, metav1.CreateOptions{})
			return err
		}
	}
	patch := func(name, body string) func(kubernetes.Interface) error {
		return func(k kubernetes.Interface) error {
			_, err := k.CoreV1().Events("default").Patch(t.Context(), name, types.MergePatchType, []byte(body),
				metav1.PatchOptions{})
			return err
		}
	}
	const cured, unsigned = `{"message":"no longer: made up"}`, `{"source":null,"reportingComponent":"x"}`
	reported := event(other, "landfall-proxy", other)
	reported.Name = "reported"
	const another, signature, noNode, size = "may write Events about its own Node only",
		"may sign Events with the names of its speaker and proxy only", "the token names no node",
		"a message of at most 1024 characters"
	for _, test := range []struct {
		what, who string
		do        func(kubernetes.Interface) error
		refusal   string // "" if it is allowed
	}{
		{"its own Node", self, create(event(self, "landfall-speaker", self)), ""},
		{"its own Node, by the proxy", self, create(event(self, "landfall-proxy", self)), ""},
		{"a Service", self, create(ofService), ""},
		{"another's Node", self, create(event(other, "landfall-speaker", self)), another},
		{"another's Node in its name", self, create(event(other, "landfall-speaker", other)), another},
		{"its own Node in another's name", self, create(event(self, "landfall-speaker", other)), signature},
		{"in the controller's name", self, create(event(self, "landfall-controller", self)), signature},
		{"in two names", self, create(half), signature},
		{"as much as it may", self, create(longest), ""},
		{"more than it may", self, create(long), size},
		{"a reason that is longer than any", self, create(longReason), size},
		{"what another reports", other, create(reported), ""},
		{"a change of what another reports", self, patch(reported.Name, cured), another},
		{"a stranger's change of it", "stranger", patch(reported.Name, cured), noNode},
		{"its own change of it, of more than it may", other, patch(reported.Name, `{"message":"`+long.Message+`"}`), size},
		{"a stranger's change of the signature", "stranger", patch(reported.Name, unsigned), noNode},
		{"its own change of it", other, patch(reported.Name, cured), ""},
		{"a stranger in the name of a speaker", "stranger", create(event(self, "landfall-speaker", self)), noNode},
		{"a stranger half in the name of a speaker", "stranger", create(half), noNode},
		{"a stranger in the name of a proxy, by the other API", "stranger", func(k kubernetes.Interface) error {
			_, err := k.EventsV1().Events("default").Create(t.Context(), &eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Name: "new-api", Namespace: "default"},
				Regarding:  corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: self, Namespace: "default"},
				EventTime:  metav1.NowMicro(), ReportingController: "landfall-proxy", ReportingInstance: self, Action: "Look",
				Type: corev1.EventTypeWarning, Reason: "ForwardingOff", Note: "made up"}, metav1.CreateOptions{})
			return err
		}, noNode},
		{"a stranger in its own name", "stranger", create(event(self, "kubelet", self)), ""},
	} {
		t.Run(test.what, func(t *testing.T) {
			eventually(t, "the API server knows the role and the policy", func() error {
				return refused(test.do(clients[test.who]), test.refusal)
			})
		})
	}
}

// eventWriter returns a client that may write Events in the namespace default.
func eventWriter(t *testing.T, l *lab.Lab) kubernetes.Interface {
	t.Helper()
	const namespace, name = "default", "event-writer"
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"", "events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}}}}
	binding := &rbacv1.RoleBinding{ObjectMeta: role.ObjectMeta,
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: name, Namespace: namespace}}}
	if _, err := l.Kube().RbacV1().Roles(namespace).Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	bindings := l.Kube().RbacV1().RoleBindings(namespace)
	if _, err := bindings.Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	client, err := l.KubeWithToken(tokenOf(t, l, name))
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// nodesWriteTheirOwn does as one who has taken over a node: with the token of its pod.
func nodesWriteTheirOwn(t *testing.T, l *lab.Lab) {
	self, other := l.Cluster().Nodes[1].Name, l.Cluster().Nodes[2].Name
	node, err := l.KubeAs(l.Agent("speaker", self))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.ApplyYAML(t.Context(), `{apiVersion: landfall.dev/v1beta1, kind: BGPPeer, metadata: {name: far},
  spec: {myASN: 64500, peerASN: 64501, peerAddress: 192.0.2.1}}`); err != nil {
		t.Fatal(err)
	}
	peers := "/apis/landfall.dev/v1beta1/bgppeers/far/status"
	service := "/api/v1/namespaces/default/services/my-nginx/status"
	gateways := "/api/v1/namespaces/" + lab.Namespace + "/configmaps/landfall-surroundings"
	entry := func(name, state string) string {
		return fmt.Sprintf(`{"apiVersion":"landfall.dev/v1beta1","kind":"BGPPeer","metadata":{"name":"far"},`+
			`"status":{"nodes":[{"name":%q,"state":%q}]}}`, name, state)
	}
	asRequested := func(node string) string {
		return fmt.Sprintf(`{"status":{"conditions":[{"type":"landfall.dev/AsRequested","status":"False","reason":"Test",`+
			`"message":"%s: x","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`, node)
	}
	// What a write says of managers and their fields stays with an object for good.
	managed := fmt.Sprintf(`{"metadata":{"managedFields":[{"manager":"landfall-speaker","operation":"Update",`+
		`"apiVersion":"v1","time":"2026-01-01T00:00:00Z","fieldsType":"FieldsV1","fieldsV1":{"f:data":{%s}}}]}}`,
		manyFields())
	serving := func(reason, message string) string {
		return fmt.Sprintf(`{"type":"landfall.dev/Serving","status":"False","reason":%q,"message":%q,`+
			`"lastTransitionTime":"2026-01-01T00:00:00Z"}`, reason, message)
	}
	eventually(t, "both nodes report on the peer, and what they tell of their networks", func() error {
		raw, err := l.Kube().CoreV1().RESTClient().Get().AbsPath(peers).DoRaw(t.Context())
		if err == nil &&
			(!strings.Contains(string(raw), `"name":"`+self) || !strings.Contains(string(raw), `"name":"`+other)) {
			err = fmt.Errorf("%s", raw)
		}
		return err
	})
	for _, test := range []struct {
		what, path string
		kind       types.PatchType
		body       string
		refusal    string // "" if it is allowed
	}{
		{"its own condition", service, types.StrategicMergePatchType,
			`{"status":{"conditions":[{"type":"landfall.dev/Announced","status":"False","reason":"Test","message":"x"}]}}`, ""},
		{"the annotation", service, types.MergePatchType,
			`{"metadata":{"annotations":{"landfall.dev/announcements":"x"}}}`, ""},
		{"an annotation that leaves no room to others", service, types.MergePatchType,
			fmt.Sprintf(`{"metadata":{"annotations":{"landfall.dev/announcements":%q}}}`, strings.Repeat("x", 20_000)),
			"at most 16384 characters"},
		{"a condition that leaves no room to others", service, types.StrategicMergePatchType,
			`{"status":{"conditions":[` + serving("Test", strings.Repeat("x", 20_000)) + `]}}`, "a message of at most 16384"},
		{"a reason that leaves no room to others", service, types.StrategicMergePatchType,
			`{"status":{"conditions":[` + serving(strings.Repeat("X", 65), "x") + `]}}`, "a reason of at most 64"},
		{"a condition again and again", service, types.JSONPatchType,
			`[{"op":"add","path":"/status/conditions/-","value":` + serving("Test", "x") + `},` +
				`{"op":"add","path":"/status/conditions/-","value":` + serving("Test", "y") + `}]`,
			"may write a condition of a Service once"},
		{"its own condition under another name", service, types.ApplyPatchType, `{"apiVersion":"v1","kind":"Service",` +
			`"metadata":{"name":"my-nginx"},"status":{"conditions":[` + serving("Test", "x") + `]}}`,
			"may not apply a Service"},
		{"what it says for itself", service, types.StrategicMergePatchType, asRequested(self), ""},
		{"what another node says", service, types.StrategicMergePatchType, asRequested(other),
			"node " + self + " may say landfall.dev/AsRequested for itself only"},
		{"the controller's condition", service, types.StrategicMergePatchType,
			`{"status":{"conditions":[{"type":"landfall.dev/Assigned","status":"False","reason":"Test","message":"x"}]}}`,
			"denied request"}, // by two policies, of which the API server names one
		{"another's condition", service, types.StrategicMergePatchType,
			`{"status":{"conditions":[{"type":"example.com/X","status":"False","reason":"Test","message":"x",` +
				`"lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`, "landfall.dev/AsRequested only"},
		{"an address", service, types.MergePatchType, `{"status":{"loadBalancer":{"ingress":[{"ip":"172.26.236.200"}]}}}`,
			"may not change the addresses of a Service"},
		{"no address", service, types.MergePatchType, `{"status":{"loadBalancer":null}}`,
			"may not change the addresses of a Service"},
		{"another annotation", service, types.MergePatchType, `{"metadata":{"annotations":{"example.com/x":"y"}}}`,
			"landfall.dev/announcements only"},
		{"a label", service, types.MergePatchType, `{"metadata":{"labels":{"example.com/x":"y"}}}`, "may not change labels"},
		{"a finalizer", service, types.MergePatchType, `{"metadata":{"finalizers":["example.com/x"]}}`,
			"may not change labels"},
		{"its session", peers, types.ApplyPatchType, entry(self, "Idle"), ""},
		{"another's session", peers, types.ApplyPatchType, entry(other, "Forged"),
			"node " + self + " may write its own entry in status.nodes only"},
		{"its session under another name", peers + "?fieldManager=stranger", types.ApplyPatchType, entry(self, "Idle"),
			"node " + self + " may write as the manager landfall-speaker/" + self + " only"},
		{"no session of another", peers, types.MergePatchType, `{"status":{"nodes":null}}`, "its own entry"},
		{"a session of no node", peers, types.ApplyPatchType, entry("nowhere", "Idle"), "its own entry"},
		{"its gateways", gateways, types.MergePatchType, fmt.Sprintf(`{"data":{%q:""}}`, self), ""},
		{"gateways that leave no room to others", gateways, types.MergePatchType,
			fmt.Sprintf(`{"data":{%q:%q}}`, self, strings.Repeat("172.26.236.1 x\n", 300)), "at most 4096 characters"},
		{"another's gateways", gateways, types.MergePatchType, fmt.Sprintf(`{"data":{%q:"172.26.236.1 x"}}`, other),
			"node " + self + " may write its own key in data only"},
		{"no gateways of another", gateways, types.MergePatchType, fmt.Sprintf(`{"data":{%q:null}}`, other), "its own key"},
		{"gateways for ever", gateways, types.MergePatchType, `{"immutable":true}`, "may write data only"},
		{"managers that leave no room to others", gateways, types.MergePatchType, managed,
			"may not fill metadata.managedFields"},
		{"gateways of an owner that is gone", gateways, types.MergePatchType, `{"metadata":{"ownerReferences":[` +
			`{"apiVersion":"v1","kind":"ConfigMap","name":"gone","uid":"0"}]}}`, "may not change labels"},
		{"gateways that nobody can delete", gateways, types.MergePatchType, `{"metadata":{"finalizers":["example.com/x"]}}`,
			"may not change labels"},
	} {
		t.Run(test.what, func(t *testing.T) {
			manager := "stranger"
			if test.path == peers {
				manager = "landfall-speaker/" + self
			}
			path := strings.TrimSuffix(test.path, "?fieldManager=stranger")
			patch := node.CoreV1().RESTClient().Patch(test.kind).AbsPath(path).Param("fieldManager", manager)
			if test.kind == types.ApplyPatchType {
				patch = patch.Param("force", "true")
			}
			err := patch.Body([]byte(test.body)).Do(t.Context()).Error()
			if test.refusal == "" && err != nil ||
				test.refusal != "" && (err == nil || !strings.Contains(err.Error(), test.refusal)) {
				t.Errorf("%v, want a refusal with %q", err, test.refusal)
			}
		})
	}
	// What a node has said that is gone, another may remove, and a speaker does.
	gone := l.Kube().CoreV1().RESTClient().Patch(types.ApplyPatchType).AbsPath(peers).Param("fieldManager", "nowhere").
		Body([]byte(entry("nowhere", "Idle"))).Do(t.Context()).Error()
	if gone != nil {
		t.Fatal(gone)
	}
	eventually(t, "the entry of a node that is gone is removed", func() error {
		raw, err := l.Kube().CoreV1().RESTClient().Get().AbsPath(peers).DoRaw(t.Context())
		if err == nil && strings.Contains(string(raw), `"nowhere"`) {
			err = fmt.Errorf("%s", raw)
		}
		return err
	})
	for what, create := range map[string]func() error{
		"may write the ConfigMap landfall-surroundings only": func() error {
			_, err := node.CoreV1().ConfigMaps(lab.Namespace).Create(t.Context(),
				&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{})
			return err
		},
	} {
		if err := create(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want a refusal with %q", err, what)
		}
	}
	nodesSpeakForThemselves(t, l, node, self, other)
	// The agents themselves are not refused anything.
	for _, a := range append(l.Agents("speaker"), l.Agents("controller")...) {
		for line := range strings.Lines(a.Log()) {
			if strings.Contains(line, "ValidatingAdmissionPolicy") || strings.Contains(line, "forbidden") {
				t.Errorf("%s: %s", a.Name(), line)
			}
		}
	}
}

// manyFields are fields that a manager says it owns, more than there are.
func manyFields() string {
	var all []string
	for i := range 2000 {
		all = append(all, fmt.Sprintf(`"f:x%d":{}`, i))
	}
	return strings.Join(all, ",")
}

// nodesSpeakForThemselves has a node write the Lease by which the sides of a partition hear of one another, as a
// speaker does and as it must not.
func nodesSpeakForThemselves(t *testing.T, l *lab.Lab, node kubernetes.Interface, self, other string) {
	const name = "landfall-speaker"
	lease := func(name, holder, live string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name,
			Annotations: map[string]string{"landfall.dev/live": live}},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder}}
	}
	kept := lease(name, self, self)
	kept.Finalizers = []string{"example.com/x"}
	filled := lease(name, self, self)
	filled.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "landfall-speaker", Operation: "Update",
		APIVersion: "coordination.k8s.io/v1", FieldsType: "FieldsV1",
		FieldsV1: &metav1.FieldsV1{Raw: []byte(`{"f:spec":{` + manyFields() + `}}`)}}}
	silent := lease(name, self, "")
	silent.Annotations = nil
	leases := node.CoordinationV1().Leases(lab.Namespace)
	// Speakers write the Lease only while they miss one.
	if err := l.Kube().CoordinationV1().Leases(lab.Namespace).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil &&
		!apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	for _, test := range []struct {
		what    string
		lease   *coordinationv1.Lease
		refusal string // "" if it is allowed
	}{
		{"another Lease", lease("x", self, self), "may write the Lease landfall-speaker only"},
		{"a new one in another's name", lease(name, other, other+","+self), "in its own name only"},
		{"a new one", lease(name, self, other+","+self), ""},
		{"its own again", lease(name, self, self+","+other), ""},
		{"in another's name", lease(name, other, other+","+self), "in its own name only"},
		{"in nobody's name", lease(name, "", self), "in its own name only"},
		{"a list of others", lease(name, self, other+",x"+self+","+self+"x"), "may write lists of speakers with itself only"},
		{"no list", silent, "may write lists of speakers with itself only"},
		{"one that has room for nobody else", filled, "may not fill metadata.managedFields"},
		{"one that nobody can delete", kept, "no finalizers and owners"},
	} {
		t.Run(test.what, func(t *testing.T) {
			eventually(t, "no speaker writes it at the same time", func() error {
				had, err := leases.Get(t.Context(), name, metav1.GetOptions{})
				test.lease.ResourceVersion = ""
				switch {
				case apierrors.IsNotFound(err) || test.lease.Name != name:
					_, err = leases.Create(t.Context(), test.lease, metav1.CreateOptions{})
				case err == nil:
					test.lease.ResourceVersion = had.ResourceVersion
					_, err = leases.Update(t.Context(), test.lease, metav1.UpdateOptions{})
				}
				return refused(err, test.refusal)
			})
		})
	}
}

// refused returns what is wrong with the answer to a request, which is to be a refusal with these words, or
// none if there are no words.
func refused(err error, words string) error {
	switch {
	case words == "":
		return err
	case err == nil:
		return fmt.Errorf("it is accepted, want a refusal with %q", words)
	case !strings.Contains(err.Error(), words):
		return fmt.Errorf("want a refusal with %q: %w", words, err)
	}
	return nil
}
