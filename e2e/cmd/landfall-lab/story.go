package main

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// spread prints how requests came out.
func (d *story) spread(s lab.Spread) {
	rows := [][]string{{"POD", "REQUESTS", "", "THE CLIENT, AS THE POD SAW IT"}}
	for _, pod := range slices.Sorted(maps.Keys(s.Pods)) {
		var sources []string
		for _, a := range slices.SortedFunc(maps.Keys(s.SourcesOf[pod]), netip.Addr.Compare) {
			sources = append(sources, fmt.Sprintf("%s%s", a, d.whose(a)))
		}
		rows = append(rows, []string{pod, strconv.Itoa(s.Pods[pod]), strings.Repeat("▪", s.Pods[pod]/5),
			strings.Join(sources, ", ")})
	}
	d.table(rows)
	d.line("")
}

func (d *story) answered(s lab.Spread, sent int) error {
	if len(s.Failures) > 0 {
		return d.promise(false, "all %d requests are answered; %d are not, the first: %v", sent, len(s.Failures),
			s.Failures[0])
	}
	return d.promise(true, "%d of %d requests to %s answered", sent, sent, d.target())
}

// whose names the node that has an address.
func (d *story) whose(a netip.Addr) string {
	for _, n := range d.lab.Cluster().Nodes {
		if n.Addr == a {
			return " (" + n.Name + ")"
		}
		if n.Gateway() == a {
			return " (" + n.Name + ", " + lab.PodBridge + ")"
		}
	}
	return ""
}

func (d *story) target() netip.AddrPort { return netip.AddrPortFrom(d.vip, 80) }

// podOn returns the Service's pod on a node, or "".
func (d *story) podOn(node string) string {
	for _, p := range d.lab.Pods("my-nginx") {
		if p.Node == node {
			return p.Name
		}
	}
	return ""
}

func (d *story) service(ctx context.Context) (*corev1.Service, error) {
	return d.lab.Kube().CoreV1().Services("default").Get(ctx, "my-nginx", metav1.GetOptions{})
}

// wait waits for what should come soon.
func (d *story) wait(ctx context.Context, what string, f func(context.Context) error) error {
	return d.waitLong(ctx, what, 20*time.Second, f)
}

func (d *story) waitLong(ctx context.Context, what string, limit time.Duration, f func(context.Context) error) error {
	if err := lab.WaitFor(ctx, d.progress, what, limit, f); err != nil {
		return fmt.Errorf("not as promised: %w", err)
	}
	return nil
}

// showLogs prints the last lines of each agent, after a failure.
func (d *story) showLogs() {
	logs := d.lab.Logs(3)
	for _, name := range slices.Sorted(maps.Keys(logs)) {
		if strings.HasPrefix(name, "k8s-") && logs[name] != "" {
			d.line("")
			d.line("%s:", name)
			for line := range strings.Lines(logs[name]) {
				d.line("  %s", strings.TrimSpace(line))
			}
		}
	}
}

func pause(ctx context.Context, length time.Duration) {
	select {
	case <-time.After(length):
	case <-ctx.Done():
	}
}
