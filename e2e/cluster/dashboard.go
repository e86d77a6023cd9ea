package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// dashboardData is what the dashboard shows, as far as shown looks.
type dashboardData struct {
	Synced   bool
	Overview struct{ Wrong int }
	Page     struct {
		Rows []struct {
			Name      string
			Addresses []struct {
				VIP, Owner string
				Routes     []struct{ Nodes []string }
			}
		}
	}
}

// shows returns an error unless the dashboard's data have each Service of Webs at its address, with a node
// that announces it, and nothing that is wrong.
func shows(text string) error {
	var data dashboardData
	if err := json.Unmarshal([]byte(text), &data); err != nil {
		return fmt.Errorf("the dashboard's data: %w: %s", err, text)
	}
	missing := map[string]bool{}
	for _, w := range Webs {
		missing[w.Name] = true
	}
	for _, row := range data.Page.Rows {
		for _, a := range row.Addresses {
			i := slices.IndexFunc(Webs, func(w Web) bool { return w.Name == row.Name && w.Addr.String() == a.VIP })
			if i >= 0 && (a.Owner != "" && !Webs[i].Routed() || len(a.Routes) > 0 && len(a.Routes[0].Nodes) > 0) {
				delete(missing, row.Name)
			}
		}
	}
	if len(missing) > 0 || !data.Synced || data.Overview.Wrong > 0 {
		return fmt.Errorf("the dashboard lacks %v, or is not well: %s", missing, text)
	}
	return nil
}

// dashboard looks at the dashboard in the two ways that its page names: with landfallctl, as a user with the
// chart's roles, and with a token that this user gets, at each controller. Others get nothing.
func (c *Cluster) dashboard(ctx context.Context, kubeconfig string, say func(format string, args ...any)) error {
	if err := c.Run("dashboard", lab.ClientName, landfallctlPath(), "--kubeconfig", kubeconfig, "dashboard"); err != nil {
		return err
	}
	if err := lab.WaitFor(ctx, c.options.Progress, "landfallctl dashboard", time.Minute, func(ctx context.Context) error {
		log, err := os.ReadFile(path.Join(c.LogFolder(), "dashboard.log"))
		if err != nil {
			return err
		}
		url, _, _ := strings.Cut(string(log), "\n")
		if !strings.HasPrefix(url, "http://127.0.0.1:") {
			return fmt.Errorf("it says %q", log)
		}
		return c.dashboardAt(ctx, lab.ClientName, url)
	}); err != nil {
		return err
	}
	token, err := c.bearer(ctx, kubeconfig, "landfall-dashboard")
	if err != nil {
		return err
	}
	other, err := c.bearer(ctx, c.Kubeconfig(), "default")
	if err != nil {
		return err
	}
	pods, err := c.Kube().CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/component=controller"})
	if err != nil {
		return err
	}
	for _, p := range pods.Items {
		url := "https://" + p.Status.PodIP + ":7480/dashboard/"
		if err := c.dashboardAt(ctx, c.nodes[0].Name, url, token); err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
		for want, header := range map[string]string{"401": "Accept: */*", "403": other} {
			// Before that 503: a controller asks the API server about one unknown token of a client in a second.
			if err := lab.WaitFor(ctx, c.options.Progress, "an answer "+want, time.Minute, func(ctx context.Context) error {
				text, code, err := c.curl(ctx, c.nodes[0].Name, url+"data", header)
				if err == nil && code != want {
					err = fmt.Errorf("%s answers %s to a user who may not see the dashboard, not %s: %s", p.Name, code, want, text)
				}
				return err
			}); err != nil {
				return err
			}
		}
	}
	is, err := c.Credentials("nobody", nil)
	if err != nil {
		return err
	}
	const rule = `resources: ["pods"], verbs: ["list"]`
	code, out, err := c.landfallctl(ctx, is.Kubeconfig, "dashboard")
	if err == nil && (code != 2 || !strings.Contains(out, rule)) {
		err = fmt.Errorf("without a role landfallctl dashboard ends with %d, and does not name the rule %s: %s", code, rule,
			out)
	}
	if err != nil {
		return err
	}
	say("the dashboard shows %d Services through landfallctl and, with a token, at %d controllers; others get 401 and 403",
		len(Webs), len(pods.Items))
	return nil
}

// bearer returns a header with a token of a ServiceAccount in Landfall's namespace.
func (c *Cluster) bearer(ctx context.Context, kubeconfig, account string) (string, error) {
	token, err := c.Exec(ctx, lab.ClientName, c.Kubectl(), "--kubeconfig", kubeconfig, "-n", Namespace, "create", "token",
		account)
	return "Authorization: Bearer " + strings.TrimSpace(token), err
}

// dashboardAt looks at the dashboard's page and data.
func (c *Cluster) dashboardAt(ctx context.Context, host, url string, headers ...string) error {
	page, code, err := c.curl(ctx, host, url, headers...)
	if err != nil || code != "200" || !strings.Contains(page, "<title>Landfall") {
		return fmt.Errorf("the page is %s (%w): %s", code, err, page)
	}
	data, code, err := c.curl(ctx, host, url+"data", headers...)
	if err != nil || code != "200" {
		return fmt.Errorf("the data are %s (%w): %s", code, err, data)
	}
	return shows(data)
}

// curl asks once, whatever the certificate, and returns the answer and its code.
func (c *Cluster) curl(ctx context.Context, host, url string, headers ...string) (body, code string, err error) {
	argv := []string{"curl", "-sSk", "--max-time", "10", "-w", "\n%{http_code}"}
	for _, h := range headers {
		argv = append(argv, "-H", h)
	}
	out, err := c.Exec(ctx, host, append(argv, url)...)
	i := strings.LastIndex(out, "\n")
	return out[:max(i, 0)], out[i+1:], err
}
