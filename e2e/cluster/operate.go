package cluster

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// operator is the user to whom the chart binds the roles for all commands of landfallctl.
const operator = "operator"

// Operates looks after the cluster with landfallctl, as a user with the roles that the chart has for
// that, under traffic: trace names the pods that answer, a drain moves addresses without losing a
// connection, flows shows which ones other nodes pass on, watch tells of it, a bundle has everything
// but secrets, and the dashboard shows what there is.
func (c *Cluster) Operates(ctx context.Context, say func(format string, args ...any)) error {
	is, err := c.Credentials(operator, nil)
	if err != nil {
		return err
	}
	bind := "rbac.operators[0].kind=User,rbac.operators[0].apiGroup=rbac.authorization.k8s.io,rbac.operators[0].name=" +
		operator + ",controller.dashboard.enabled=true"
	if _, err := c.Helm(ctx, append([]string{"upgrade", "--set", bind}, c.InstallArgs()...)...); err != nil {
		return err
	}
	if err := c.Run("watch", lab.ClientName, landfallctlPath(), "--kubeconfig", is.Kubeconfig, "watch", "-o",
		"json"); err != nil {
		return err
	}
	if err := c.traced(ctx, is.Kubeconfig); err != nil {
		return err
	}
	say("landfallctl trace names the pods that answer, for %d Services from two clients", len(Webs))
	if err := c.drains(ctx, is.Kubeconfig, say); err != nil {
		return errors.Join(err, c.explain(ctx))
	}
	if err := c.bundles(ctx, is.Kubeconfig, say); err != nil {
		return err
	}
	return c.dashboard(ctx, is.Kubeconfig, say)
}

var webPod = regexp.MustCompile(`web-[a-z0-9]+-[a-z0-9]+`)

// traced compares the pods that trace names with those that answer.
func (c *Cluster) traced(ctx context.Context, kubeconfig string) error {
	for _, from := range []struct{ host, addr string }{
		{lab.ClientName, c.Lab.Cluster().LAN.Client.String()}, {lab.FarClientName, c.Lab.Cluster().Far.Client.String()},
	} {
		for _, w := range Webs {
			line := "trace " + from.addr + " svc/web/" + w.Name + ":80"
			code, out, err := c.landfallctl(ctx, kubeconfig, line)
			if err != nil {
				return err
			}
			named := slices.Sorted(slices.Values(webPod.FindAllString(out, -1)))
			answer := slices.Sorted(maps.Keys(c.Spread(ctx, from.host, "tcp", w.Target(), 40).Pods))
			if code != 0 || !slices.Equal(slices.Compact(named), answer) {
				return fmt.Errorf("landfallctl %s ends with %d, the pods %s answer: %s", line, code, answer, out)
			}
		}
	}
	return nil
}

// drains drains the node that has the first Service's address while connections are open, which other
// nodes then pass on to it, and gives it back once they have ended.
func (c *Cluster) drains(ctx context.Context, kubeconfig string, say func(format string, args ...any)) error {
	ask := func(line string, want int) (string, error) {
		code, out, err := c.landfallctl(ctx, kubeconfig, line)
		if err == nil && code != want {
			err = fmt.Errorf("landfallctl %s ends with %d, not %d: %s", line, code, want, out)
		}
		return out, err
	}
	service := Webs[0]
	node, err := c.owner(ctx, service.Addr)
	if err != nil {
		return err
	}
	moved := func() error {
		out, err := ask("drain "+node+" --timeout 15s", 1) // the long-lived connections last
		if err != nil {
			return err
		}
		if now, err := c.owner(ctx, service.Addr); err != nil || now == node {
			return fmt.Errorf("%s is at %s after landfallctl drain (%w): %s", service.Name, now, err, out)
		}
		if out, err = ask("flows "+service.Name+" -n web -o json --limit 10000", 0); err != nil {
			return err
		}
		var said struct {
			Flows []struct {
				Node      string
				State     string
				RescuedBy []string
			}
		}
		if err := json.Unmarshal([]byte(out), &said); err != nil {
			return fmt.Errorf("landfallctl flows: %w: %s", err, out)
		}
		rescued := 0
		for _, f := range said.Flows {
			if f.Node == node && len(f.RescuedBy) > 0 && f.State == "ESTABLISHED" {
				rescued++
			}
		}
		if rescued < 2*longLived {
			return fmt.Errorf("landfallctl flows shows %d connections that other nodes pass on to %s, not %d", rescued,
				node, 2*longLived)
		}
		return nil
	}
	of, err := c.underLoad(ctx, longLived, []string{lab.ClientName, lab.FarClientName}, Webs, moved)
	if err == nil {
		err = of.Err()
	}
	say("landfallctl drain %s, which had %s: %s", node, service.Name, of)
	if err != nil {
		return fmt.Errorf("landfallctl drain: %w", err)
	}
	if _, err := ask("drain "+node+" --timeout 1m", 0); err != nil {
		return err
	}
	if _, err := ask("undrain "+node, 0); err != nil {
		return err
	}
	if err := c.answers(ctx, kubeconfig, question{"status", 0}); err != nil {
		return err
	}
	return c.watched(node)
}

// watched looks that landfallctl watch has told of the drain, and of an address that moved away.
func (c *Cluster) watched(node string) error {
	text, err := os.ReadFile(path.Join(c.LogFolder(), "watch.log"))
	if err != nil {
		return err
	}
	missing := map[string]bool{"drain": true, "undrain": true, "owner": true}
	for line := range bytes.Lines(text) {
		var said struct{ Kind, Namespace, Name, What, From, To string }
		if json.Unmarshal(line, &said) != nil { // what it says of itself
			continue
		}
		switch {
		case said.Kind == "Node" && said.Name == node && said.What == "drain" && said.To != "":
			delete(missing, "drain")
		case said.Kind == "Node" && said.Name == node && said.What == "drain":
			delete(missing, "undrain")
		case said.Kind == "Service" && said.Namespace == "web" && said.Name == Webs[0].Name && said.What == "owner" &&
			said.From == node && said.To != node:
			delete(missing, "owner")
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("landfallctl watch has not told of %v: %s", slices.Sorted(maps.Keys(missing)), text)
	}
	return nil
}

// bundles writes an archive for a bug report, and looks that all programs are in it and no secret is.
func (c *Cluster) bundles(ctx context.Context, kubeconfig string, say func(format string, args ...any)) error {
	file := c.Path("bundle.tar.gz")
	code, out, err := c.landfallctl(ctx, kubeconfig, "bundle -f "+file)
	if err != nil {
		return err
	}
	if code != 0 || !strings.Contains(out, "everything was read") {
		return fmt.Errorf("landfallctl bundle ends with %d: %s", code, out)
	}
	files, err := unpack(file)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	pods, err := c.Kube().CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, p := range pods.Items {
		for _, container := range p.Spec.Containers {
			at := "programs/" + p.Name + "/" + container.Name
			if len(files[at+".log"]) == 0 {
				return fmt.Errorf("landfallctl bundle has no %s.log", at)
			}
			if said := files[at+".status.json"]; container.Name != "controller" && !json.Valid(said) {
				return fmt.Errorf("landfallctl bundle: %s.status.json is no JSON: %s", at, said)
			}
		}
	}
	secrets, err := c.Kube().CoreV1().Secrets(Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	looked := 0
	for _, s := range secrets.Items {
		for key, value := range s.Data {
			if s.Type == "helm.sh/release.v1" { // what helm keeps of a release
				continue
			}
			looked++
			for name, content := range files {
				if bytes.Contains(content, value) || bytes.Contains(content, []byte(base64.StdEncoding.EncodeToString(value))) {
					return fmt.Errorf("landfallctl bundle: %s has the %s of the Secret %s", name, key, s.Name)
				}
			}
		}
	}
	if looked == 0 {
		return errors.New("there is no Secret with a key of gossip to look for in the bundle")
	}
	say("landfallctl bundle: %d files with all programs, and without the %d secrets", len(files), looked)
	return nil
}

// unpack returns the files of a bundle by their names below its folder.
func unpack(file string) (map[string][]byte, error) {
	in, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	text, err := gzip.NewReader(in)
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	for archive := tar.NewReader(text); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		} else if err != nil {
			return nil, err
		}
		_, name, _ := strings.Cut(header.Name, "/")
		if files[name], err = io.ReadAll(archive); err != nil {
			return nil, err
		}
	}
}
