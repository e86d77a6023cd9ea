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
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestContract11WhoMayAskAndWrite checks with the chart's defaults and a real API server who may
// read metrics and status.
func TestContract11WhoMayAskAndWrite(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	waitAnnounced(t, l, "my-nginx", seedVIP.Addr().String())
	t.Run("metrics", func(t *testing.T) { metricsAreForReaders(t, l) })
	t.Run("status", func(t *testing.T) { statusIsForThePod(t, l) })
}

// metricsPorts are the ports of the programs.
var metricsPorts = map[string]string{"controller": "7480", "speaker": "7481", "proxy": "7482"}

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
