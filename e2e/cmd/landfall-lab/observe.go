package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
	speakerplan "github.com/landfall-lb/landfall/speaker/plan"
)

// announced returns the owner that the Service names, and the message of its condition Announced.
func (d *story) announced(ctx context.Context) (owner, message string, err error) {
	svc, err := d.service(ctx)
	if err != nil {
		return "", "", err
	}
	announcements, err := lb.DecodeAnnouncements(svc.Annotations[lb.AnnotationAnnouncements])
	if err != nil {
		return "", "", err
	}
	for _, c := range svc.Status.Conditions {
		if c.Type != lb.ConditionAnnounced || c.Status != "True" {
			continue
		}
		for _, a := range announcements {
			if a.VIP == d.vip {
				return announcedBy(a), c.Message, nil
			}
		}
	}
	return "", "", fmt.Errorf("conditions: %s", conditions(svc))
}

// announcedBy names the nodes that announce a VIP.
func announcedBy(a lb.Announcement) string {
	if a.Owner != "" {
		return a.Owner
	}
	var nodes []string
	for _, r := range a.Routes {
		nodes = append(nodes, r.Nodes...)
	}
	return strings.Join(nodes, ", ")
}

func conditions(svc *corev1.Service) string {
	var all []string
	for _, c := range svc.Status.Conditions {
		all = append(all, fmt.Sprintf("%s=%s (%s: %s)", c.Type, c.Status, c.Reason, c.Message))
	}
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}

// nodeStatuses asks a node's speaker for the status of each node on the VIP.
func (d *story) nodeStatuses(ctx context.Context, node string) ([]speakerplan.NodeStatus, error) {
	var status struct {
		VIPs []struct {
			VIP   netip.Addr               `json:"vip"`
			Nodes []speakerplan.NodeStatus `json:"nodes"`
		} `json:"vips"`
	}
	if err := d.status(ctx, "speaker", node, &status); err != nil {
		return nil, err
	}
	for _, v := range status.VIPs {
		if v.VIP == d.vip {
			return v.Nodes, nil
		}
	}
	return nil, fmt.Errorf("the speaker on %s does not know %s", node, d.vip)
}

// delivery is what a proxy says of a VIP.
type delivery struct {
	VIP        netip.Addr `json:"vip"`
	Programmed bool       `json:"programmed"`
	Message    string     `json:"message"`
	LocalReady int        `json:"localReady"`
	Ready      int        `json:"ready"`
}

// delivery asks a node's proxy what its kernel is confirmed to do with the VIP.
func (d *story) delivery(ctx context.Context, node string) (delivery, error) {
	var status struct {
		Services []struct {
			VIPs []delivery `json:"vips"`
		} `json:"services"`
	}
	if err := d.status(ctx, "proxy", node, &status); err != nil {
		return delivery{}, err
	}
	for _, service := range status.Services {
		for _, vip := range service.VIPs {
			if vip.VIP == d.vip {
				return vip, nil
			}
		}
	}
	return delivery{}, fmt.Errorf("the proxy on %s does not know %s", node, d.vip)
}

func (d *story) status(ctx context.Context, program, node string, into any) error {
	agent := d.lab.Agent(program, node)
	if agent == nil {
		return fmt.Errorf("the chart starts no %s on %s", program, node)
	}
	body, err := agent.Get(ctx, "/v1/status")
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(body), into)
}

// answersARP makes the client ask anew who has the VIP, and returns the answer and the node whose
// interface that is.
func (d *story) answersARP(ctx context.Context) (mac, node string, err error) {
	if _, err := d.lab.Exec(ctx, lab.ClientName, "ip", "neigh", "flush", "to", d.vip.String()); err != nil {
		return "", "", err
	}
	if _, err := d.lab.Ask(ctx, lab.ClientName, "tcp", d.target()); err != nil {
		return "", "", err
	}
	out, err := d.lab.Exec(ctx, lab.ClientName, "ip", "neigh", "show", "to", d.vip.String())
	if err != nil {
		return "", "", err
	}
	fields := strings.Fields(out)
	at := slices.Index(fields, "lladdr")
	if at < 0 || at+1 == len(fields) {
		return "", "", fmt.Errorf("no node answers ARP for %s: %s", d.vip, out)
	}
	mac = fields[at+1]
	for _, n := range d.lab.Cluster().Nodes {
		own, err := d.lab.Exec(ctx, n.Name, "cat", "/sys/class/net/eth0/address")
		if err == nil && strings.TrimSpace(own) == mac {
			return mac, n.Name, nil
		}
	}
	return "", "", errors.New("no node has the address " + mac)
}

// health is the answer of a health port.
type health struct {
	code           int
	LocalEndpoints int `json:"localEndpoints"`
}

func (d *story) health(ctx context.Context, node netip.Addr, port int32) (health, error) {
	code, body, err := d.lab.Get(ctx, lab.ClientName, fmt.Sprintf("http://%s:%d/", node, port))
	h := health{code: code}
	if err != nil {
		return h, err
	}
	return h, json.Unmarshal([]byte(body), &h)
}

// rule is one rule of a listing, taken apart for reading.
type rule struct{ chain, rule, comment string }

func (r rule) rank() int {
	return slices.IndexFunc(chainOrder, func(prefix string) bool { return strings.HasPrefix(r.chain, prefix) })
}

var commentMatch = regexp.MustCompile(`-m comment --comment ("[^"]*"|\S+) ?`)

// chainOrder is the order in which a packet comes through the chains.
var chainOrder = []string{"LF-SERVICES", "LF-NODEPORTS", "LF-FW", "LF-EXT", "LF-SVC", "LF-SVL", "LF-SEP"}

// serviceRules picks the rules of the chains with these suffixes, and those that jump to them, in
// the order of a packet's way.
func serviceRules(listing string, suffixes ...string) []rule {
	var rules []rule
	for line := range strings.Lines(listing) {
		text, ok := strings.CutPrefix(strings.TrimSpace(line), "-A ")
		if !ok || !slices.ContainsFunc(suffixes, func(s string) bool { return strings.Contains(text, s) }) {
			continue
		}
		chain, text, _ := strings.Cut(text, " ")
		r := rule{chain: chain}
		if m := commentMatch.FindStringSubmatch(text); m != nil {
			r.comment = "# " + strings.Trim(m[1], `"`)
		}
		r.rule = strings.TrimSpace(commentMatch.ReplaceAllString(text, ""))
		rules = append(rules, r)
	}
	slices.SortStableFunc(rules, func(a, b rule) int { return a.rank() - b.rank() })
	return rules
}
