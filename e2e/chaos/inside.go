package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
)

// serviceNetworks are those of cluster IPs.
var serviceNetworks = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:10:96::/112")}

// ofServices reports whether an address is one that Services may get.
func ofServices(a netip.Addr) bool {
	for _, span := range []string{lanPool, lanMore, lanPool6, routedPool, routedPool6} {
		first, last, _ := strings.Cut(span, "-")
		if netip.MustParseAddr(first).Compare(a) <= 0 && a.Compare(netip.MustParseAddr(last)) <= 0 {
			return true
		}
	}
	return slices.ContainsFunc(serviceNetworks, func(p netip.Prefix) bool { return p.Contains(a) })
}

// kernel reads what a node's kernel holds for Services. Programs that print rules warn on standard error of those that
// another of them manages.
func (r *runner) kernel(ctx context.Context, node string) (k contract.Kernel, err error) {
	k.Delivered = map[contract.Port]bool{}
	for _, part := range []struct {
		command string
		read    func(string, *contract.Kernel) error
	}{
		{"nft -j list ruleset 2>/dev/null", readNftables},
		{"iptables-save 2>/dev/null && ip6tables-save 2>/dev/null", readIptables},
		{"conntrack -L -p udp 2>/dev/null", readFlows},
	} {
		text, err := r.lab.Exec(ctx, node, "sh", "-c", part.command)
		if err == nil {
			err = part.read(text, &k)
		}
		if err != nil {
			return k, fmt.Errorf("kernel of %s: %w", node, err)
		}
	}
	return k, nil
}

// readNftables reads the elements of Landfall's tables that stay until somebody removes them, from what "nft -j list
// ruleset" prints.
func readNftables(listing string, k *contract.Kernel) error {
	type object struct {
		Table, Name string
		Elem        []any
		Flags       flags
	}
	var ruleset struct {
		Nftables []struct{ Set, Map *object }
	}
	if err := json.Unmarshal([]byte(listing), &ruleset); err != nil {
		return err
	}
	for _, o := range ruleset.Nftables {
		for _, set := range []*object{o.Set, o.Map} {
			if set == nil || !strings.HasPrefix(set.Table, "landfall") || slices.Contains(set.Flags, "timeout") {
				continue
			}
			for _, elem := range set.Elem {
				p, ok := portOf(elem)
				if !ok {
					continue
				}
				k.Named = append(k.Named, p)
				if set.Name == "groups" || set.Name == "local-groups" {
					k.Delivered[p] = true
				}
			}
		}
	}
	return nil
}

// portOf returns which address of a Service an element names, with its protocol and port if it does. Of a map it is the
// key that names one.
func portOf(elem any) (p contract.Port, ok bool) {
	if pair, isPair := elem.([]any); isPair && len(pair) == 2 {
		elem = pair[0]
	}
	fields := []any{elem}
	if concat, isConcat := elem.(map[string]any); isConcat {
		fields, _ = concat["concat"].([]any)
	}
	for i, f := range fields {
		text, _ := f.(string)
		a, err := netip.ParseAddr(text)
		if err != nil || !ofServices(a) {
			continue
		}
		p.To = netip.AddrPortFrom(a, 0)
		if len(fields) == i+3 {
			p.Network, _ = fields[i+1].(string)
			port, _ := fields[i+2].(float64)
			p.To = netip.AddrPortFrom(a, uint16(port))
		}
		return p, true
	}
	return p, false
}

// readIptables reads Landfall's rules from what iptables-save prints.
func readIptables(text string, k *contract.Kernel) error {
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) < 2 || words[0] != "-A" || !strings.HasPrefix(words[1], "LF-") {
			continue
		}
		after := map[string]string{}
		for i := range len(words) - 1 {
			after[words[i]] = words[i+1]
		}
		to, err := netip.ParsePrefix(after["-d"])
		if err != nil || !to.IsSingleIP() || !ofServices(to.Addr()) {
			continue
		}
		port, _ := strconv.ParseUint(after["--dport"], 10, 16) // 0 of a rule for all ports
		p := contract.Port{To: netip.AddrPortFrom(to.Addr(), uint16(port))}
		if port != 0 {
			p.Network = after["-p"]
		}
		k.Named = append(k.Named, p)
		if target := after["-j"]; strings.HasPrefix(target, "LF-EXT-") || strings.HasPrefix(target, "LF-SVC-") ||
			strings.HasPrefix(target, "LF-SVL-") {
			k.Delivered[p] = true
		}
	}
	return nil
}

// readFlows reads connections over UDP to addresses of Services from what "conntrack -L" prints.
func readFlows(text string, k *contract.Kernel) error {
	for line := range strings.Lines(text) {
		var sources, destinations, ports []string
		for word := range strings.FieldsSeq(line) {
			switch name, value, _ := strings.Cut(word, "="); name {
			case "src":
				sources = append(sources, value)
			case "dst":
				destinations = append(destinations, value)
			case "dport":
				ports = append(ports, value)
			}
		}
		if len(sources) != 2 || len(destinations) != 2 || len(ports) != 2 {
			return fmt.Errorf("a connection in two directions has two sources: %q", line)
		}
		to, err := netip.ParseAddrPort(net.JoinHostPort(destinations[0], ports[0]))
		if err != nil {
			return err
		}
		backend, err := netip.ParseAddr(sources[1])
		if err != nil {
			return err
		}
		if ofServices(to.Addr()) {
			k.UDP = append(k.UDP, contract.UDPFlow{To: to, Backend: backend})
		}
	}
	return nil
}

// lookInside adds what the nodes' kernels hold to a snapshot.
func (r *runner) lookInside(ctx context.Context, s *contract.Snapshot) {
	services, err := r.lab.Kube().CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		s.Unknown = append(s.Unknown, err.Error())
		return
	}
	for _, object := range services.Items {
		for _, text := range object.Spec.ClusterIPs {
			if a, err := netip.ParseAddr(text); err == nil {
				s.ClusterIPs = append(s.ClusterIPs, a)
			}
		}
	}
	s.Kernels = map[string]contract.Kernel{}
	for _, node := range r.cast.Nodes {
		k, err := r.kernel(ctx, node)
		if err != nil {
			s.Unknown = append(s.Unknown, err.Error())
			continue
		}
		s.Kernels[node] = k
	}
}

// programmed says which nodes have rules for a Service. A node that has never had any is not in it.
type programmed map[string]bool

// note notes whether a node has rules now.
func (p programmed) note(node string, has bool) {
	if _, had := p[node]; had || has {
		p[node] = has
	}
}

// gone reports whether a node had rules, and has none.
func (p programmed) gone(node string) bool {
	has, had := p[node]
	return had && !has
}

// noteRules looks which nodes have rules for a Service, save those whose rules are gone.
func (r *runner) noteRules(ctx context.Context, svc contract.Service, p programmed) error {
	for _, node := range r.cast.Nodes {
		if p.gone(node) {
			continue
		}
		k, err := r.kernel(ctx, node)
		if err != nil {
			return err
		}
		p.note(node, slices.ContainsFunc(svc.Addresses, func(a netip.Addr) bool {
			return slices.ContainsFunc(svc.Ports(a), func(port contract.Port) bool { return k.Delivered[port] })
		}))
	}
	return nil
}

// bare watches the nodes after a Service was deleted until their rules for it are gone, and returns those that
// announced it after that. Rules are read before announcements: a node that announces now had to have them then.
func (r *runner) bare(ctx context.Context, svc contract.Service, rules programmed) (nodes []string, err error) {
	err = try(ctx, "rules of "+svc.Name+" go", func(ctx context.Context) error {
		if err := r.noteRules(ctx, svc, rules); err != nil {
			return err
		}
		routed, err := r.routes(ctx)
		if err != nil {
			return err
		}
		if err := r.wire.forget(); err != nil {
			return err
		}
		heard, err := r.hear(svc.Addresses, nil)
		if err != nil {
			return err
		}
		for _, a := range svc.Addresses {
			for _, node := range slices.Concat(heard[a], routed[a]) {
				if rules.gone(node) && !slices.Contains(nodes, node) {
					nodes = append(nodes, node)
				}
			}
		}
		for node, has := range rules {
			if has {
				return fmt.Errorf("%s has them", node)
			}
		}
		return nil
	})
	return nodes, err
}
