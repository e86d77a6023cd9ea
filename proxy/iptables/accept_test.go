package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// forwarder is a node with a pod behind it, and a Service whose address it translates. On its
// network are a client and another node.
type forwarder struct {
	t                       *testing.T
	node, pod, client, peer *nstest.NS
	vip, direct             string
	want                    plan.Acceptance
	name                    string // of the programs of iptables, such as ip6tables-legacy
	chain                   plan.ForwardChain
}

func newForwarder(t *testing.T, family lb.Family, kind string) *forwarder {
	f := &forwarder{t: t, node: nstest.New(t), pod: nstest.New(t), client: nstest.New(t), peer: nstest.New(t),
		vip: "198.51.100.1:80", direct: "10.244.0.2:8080", name: "iptables-" + kind,
		chain: plan.ForwardChain{Family: "ip", Table: "filter", Name: "FORWARD", Legacy: kind == "legacy"}}
	nodeAddrs, addrs, networks := []string{"192.0.2.1/24", "203.0.113.1/24", "10.244.0.1/24"},
		[]string{"192.0.2.2/24", "203.0.113.3/24", "10.244.0.2/24"}, []string{"10.244.0.0/16"}
	nat := "table ip nat { chain pre { type nat hook prerouting priority -100; " +
		"ip daddr 198.51.100.1 tcp dport 80 dnat to 10.244.0.2:8080; }; }"
	if family == lb.IPv6 {
		f.vip, f.direct, f.name, f.chain.Family = "[2001:db8:9::1]:80", "[fd00:1::2]:8080", "ip6tables-"+kind, "ip6"
		nodeAddrs, addrs, networks = []string{"2001:db8:1::1/64", "2001:db8:2::1/64", "fd00:1::1/64"},
			[]string{"2001:db8:1::2/64", "2001:db8:2::3/64", "fd00:1::2/64"}, []string{"fd00:1::/56", "fd00:7::/56"}
		nat = "table ip6 nat { chain pre { type nat hook prerouting priority -100; " +
			"ip6 daddr 2001:db8:9::1 tcp dport 80 dnat to [fd00:1::2]:8080; }; }"
	}
	f.want = plan.Acceptance{Networks: prefixes(networks...), Nodes: []netip.Addr{
		netip.MustParsePrefix(addrs[1]).Addr(), netip.MustParsePrefix(addrs[1]).Addr().Next()}}
	for i, ns := range []*nstest.NS{f.client, f.peer, f.pod} {
		nstest.Veth(t, f.node, fmt.Sprintf("eth%d", i), nodeAddrs[i], ns, "eth0", addrs[i])
		gateway := netip.MustParsePrefix(nodeAddrs[i]).Addr().String()
		ns.Run(t, "ip", "route", "add", "default", "via", gateway)
	}
	f.node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	f.node.Run(t, "nft", nat)
	f.pod.Serve(t, f.direct, func(net.Conn) {})
	return f
}

// rules runs the program of iptables on the node for each line.
func (f *forwarder) rules(lines ...string) {
	f.t.Helper()
	for _, line := range lines {
		f.node.Run(f.t, f.name, strings.Fields(line)...)
	}
}

// connects wants connections from a namespace to be answered, or not. A neighbor may need some time
// for its first answer.
func (f *forwarder) connects(what string, from *nstest.NS, to string, want bool) {
	f.t.Helper()
	patience := 300 * time.Millisecond
	if want {
		patience = time.Minute
	}
	var failed error
	from.Do(f.t, func() error {
		for end := time.Now().Add(patience); ; {
			conn, err := net.DialTimeout("tcp", to, patience)
			if failed = err; err == nil {
				return conn.Close()
			}
			if time.Now().After(end) || !want {
				return nil
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
	if (failed == nil) != want {
		f.t.Errorf("%s: a connection to %s: %v, want success: %v", what, to, failed, want)
	}
}

// look reads the chain from the kernel.
func (f *forwarder) look() (c plan.ForwardChain) {
	f.t.Helper()
	f.node.Do(f.t, func() error {
		if f.chain.Legacy {
			chains, err := LegacyForward(context.Background())
			i := slices.IndexFunc(chains, func(c plan.ForwardChain) bool { return c.String() == f.chain.String() })
			if err != nil || i < 0 {
				return errors.Join(err, fmt.Errorf("no %s in %v", f.chain, chains))
			}
			c = chains[i]
			return nil
		}
		saved, err := readFilter(context.Background(), f.chain)
		c = f.chain
		c.Drops, c.Rules = saved.drops, saved.forward()
		return err
	})
	return c
}

// set has the chain accept what is wanted, and wants it to say whether it wrote.
func (f *forwarder) set(a *Accepter, want plan.Acceptance, changes bool) {
	f.t.Helper()
	c := f.look()
	f.node.Do(f.t, func() error {
		changed, err := a.Set(context.Background(), c, want)
		if changed != changes {
			f.t.Errorf("changed %v, want %v", changed, changes)
		}
		return err
	})
}

// TestAcceptsWhatServicesForward has firewalls of both variants drop what the node forwards, in the
// ways of Docker and of ufw, and only connections of Services get through.
func TestAcceptsWhatServicesForward(t *testing.T) {
	docker := []string{"-P FORWARD DROP", "-N DOCKER-USER", "-A DOCKER-USER -j RETURN", "-A FORWARD -j DOCKER-USER",
		"-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-A FORWARD -i docker0 -j ACCEPT"}
	ufw := []string{"-N ufw-before-forward", "-A ufw-before-forward -m state --state RELATED,ESTABLISHED -j ACCEPT",
		"-N ufw-reject-forward", "-A ufw-reject-forward -m comment --comment last -j REJECT",
		"-A FORWARD -j ufw-before-forward", "-A FORWARD -j ufw-reject-forward"}
	for _, kind := range []string{"nft", "legacy"} {
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			for firewall, lines := range map[string][]string{"docker": docker, "ufw": ufw} {
				t.Run(kind+"/"+string(family)+"/"+firewall, func(t *testing.T) {
					f := newForwarder(t, family, kind)
					f.connects("no firewall", f.client, f.vip, true)
					f.rules(lines...)
					before := f.node.Run(t, f.name, "-S")
					if drops, accepted := f.look().Dropping(); !drops || accepted {
						t.Errorf("the chain drops: %v, accepts: %v", drops, accepted)
					}
					f.connects("dropped", f.client, f.vip, false)
					var a Accepter
					f.set(&a, plan.Acceptance{}, false)
					f.set(&a, f.want, true)
					f.set(&a, f.want, false)
					if drops, accepted := f.look().Dropping(); !drops || !accepted {
						t.Errorf("cured: the chain drops: %v, accepts: %v", drops, accepted)
					}
					f.connects("a Service", f.client, f.vip, true)
					f.connects("not a Service", f.client, f.direct, false)
					f.connects("another node", f.peer, f.direct, true)

					f.rules("-I FORWARD 1 -j REJECT")
					if _, accepted := f.look().Dropping(); accepted {
						t.Error("a rule in front takes all packets, and Landfall's is said to accept")
					}
					f.set(&a, f.want, true)
					f.connects("in front again", f.client, f.vip, true)
					f.rules("-D FORWARD -j REJECT", "-F "+plan.ChainAccept)
					f.set(&a, f.want, true)
					f.connects("repaired", f.client, f.vip, true)

					f.set(new(Accepter), f.want, false) // after a restart
					f.set(&a, plan.Acceptance{}, true)
					if diff := cmp.Diff(before, f.node.Run(t, f.name, "-S")); diff != "" {
						t.Errorf("left (-before +after):\n%s", diff)
					}
					f.set(&a, f.want, true)
					for range 2 {
						f.node.Do(t, func() error { return CleanupForward(context.Background()) })
						if diff := cmp.Diff(before, f.node.Run(t, f.name, "-S")); diff != "" {
							t.Errorf("left by the cleanup (-before +after):\n%s", diff)
						}
					}
				})
			}
		}
	}
}

// FuzzParseFilter checks that whatever a table filter holds, our chain is put in front of it and removed again without
// a change to a rule of others, and that a comment is nothing but a comment.
func FuzzParseFilter(f *testing.F) {
	f.Add("*filter\n:FORWARD DROP [0:0]\n:A - [0:0]\n-A FORWARD -j A\n-A A -g FORWARD\nCOMMIT\n", "say \"-j ACCEPT\"")
	f.Add("*filter\n:FORWARD ACCEPT [0:0]\n:LANDFALL-ACCEPT - [0:0]\n-A FORWARD -j LANDFALL-ACCEPT\n"+
		"-A FORWARD -m comment --comment \"a -j LANDFALL-ACCEPT b\" -j DROP\nCOMMIT\n", "a -j LF-SERVICES b")
	f.Add("*nat\n*filter\n-A \n:\nCOMMIT\n*", `\"`)
	f.Fuzz(func(t *testing.T, saved, comment string) {
		if !strings.Contains(comment, "\n") && utf8.ValidString(comment) {
			text := `-m comment --comment "` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(comment) + `" -j DROP`
			if r := (filterTable{}).read(text); !reflect.DeepEqual(r, plan.ForwardRule{Verdict: plan.VerdictDrop}) ||
				target(text) != "DROP" {
				t.Errorf("%s is read as %+v, and leads to %q", text, r, target(text))
			}
		}
		table, err := parseFilter(strings.NewReader(saved))
		if _, invalid := change(table.rules, nil); err != nil || invalid != nil {
			return
		}
		if _, ours := table.rules[plan.ChainAccept]; !ours && strings.Contains(saved, plan.ChainAccept) {
			return // no kernel has a rule that leads to a chain that is not there
		}
		accept := []string{"-j ACCEPT"}
		table.rules[chainBuiltInForward] = slices.Clip(table.rules[chainBuiltInForward])
		others := maps.Clone(table.rules)
		delete(others, plan.ChainAccept)
		others[chainBuiltInForward] = slices.DeleteFunc(slices.Clone(table.rules[chainBuiltInForward]),
			func(r string) bool { return table.read(r).To == plan.ChainAccept })
		with := maps.Clone(others)
		with[plan.ChainAccept] = accept
		hook := rule{comment: acceptComment, target: plan.ChainAccept}.hook()
		with[chainBuiltInForward] = slices.Insert(slices.Clone(others[chainBuiltInForward]), 0, hook)

		kernel := newFakeKernel()
		kernel.tables["filter"] = table.rules
		for _, step := range []struct {
			name, input string
			want        map[string][]string
		}{{"accept", table.acceptance(accept), with}, {"remove", filterTable{rules: with}.removal(), others}} {
			if err := kernel.Restore(t.Context(), step.input); err != nil {
				t.Fatalf("%s: %q: %v", step.name, step.input, err)
			}
			if diff := cmp.Diff(step.want, map[string][]string(kernel.tables["filter"]), cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("%s (-want +got):\n%s", step.name, diff)
			}
			now := plan.ForwardChain{Name: chainBuiltInForward, Rules: filterTable{rules: step.want}.forward()}
			if _, accepted := now.Dropping(); accepted != (step.name == "accept") || accepted != now.HasOwn() {
				t.Errorf("%s: our rule is in front: %v, is there: %v", step.name, accepted, now.HasOwn())
			}
		}
	})
}

// TestLegacyForwardMakesNoTable looks at a namespace in which nobody uses iptables-legacy.
func TestLegacyForwardMakesNoTable(t *testing.T) {
	ns := nstest.New(t)
	ns.Do(t, func() error {
		for range 2 {
			if chains, err := LegacyForward(context.Background()); err != nil || len(chains) > 0 {
				return fmt.Errorf("found %v, %w", chains, err)
			}
			if err := CleanupForward(context.Background()); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestReadForward reads rules as iptables-save prints them.
func TestReadForward(t *testing.T) {
	table := filterTable{rules: map[string][]string{"MINE": nil}}
	for text, want := range map[string]plan.ForwardRule{
		"":                         {},
		"-j ACCEPT":                {Verdict: plan.VerdictAccept},
		"-j MINE":                  {To: "MINE"},
		"-g MINE":                  {To: "MINE", Goto: true},
		"-s 10.0.0.0/8 -j MINE":    {To: "MINE", Conditional: true},
		"-j LOG --log-prefix DROP": {},
		"-j NFQUEUE --queue-num 1": {Verdict: plan.VerdictAccept},
		`-m comment --comment "say \"-j DROP\" to -i eth0" -j REJECT --reject-with tcp-reset`: {Verdict: plan.VerdictDrop},
		"-i cali+ ! -o docker0 -j ACCEPT": {Accept: plan.Accept{Interfaces: []string{"cali*"}}, Conditional: true,
			Verdict: plan.VerdictAccept},
		"-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT": {Accept: plan.Accept{Established: true}, Conditional: true,
			Verdict: plan.VerdictAccept},
		"-m conntrack ! --ctstate RELATED,ESTABLISHED -j ACCEPT": {Conditional: true, Verdict: plan.VerdictAccept},
		"-m state --state NEW,ESTABLISHED -j DROP":               {Conditional: true, Verdict: plan.VerdictDrop},
		"-p ipv6-icmp -j ACCEPT": {Accept: plan.Accept{ICMP: true}, Conditional: true,
			Verdict: plan.VerdictAccept},
		"-p tcp -m tcp --dport 80 -j RETURN": {Conditional: true, Verdict: plan.VerdictReturn},
	} {
		if diff := cmp.Diff(want, table.read(text)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}

// TestParseFilter takes nothing for known that was not printed to its end.
func TestParseFilter(t *testing.T) {
	const whole = "*nat\n:FORWARD DROP [0:0]\n-A FORWARD -j DROP\nCOMMIT\n*filter\n:FORWARD ACCEPT [0:0]\n:A - [0:0]\n" +
		"-A FORWARD -j A\nCOMMIT\n"
	for name, text := range map[string]string{
		"cut": whole[:len(whole)-7], "foreign": "# Table `filter' is incompatible, use 'nft' tool.\n",
		"endless": "*filter\n" + strings.Repeat("-A FORWARD -j A\n", maxFilterRules+1) + "COMMIT\n",
	} {
		if _, err := parseFilter(strings.NewReader(text)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	got, err := parseFilter(strings.NewReader(whole))
	want := filterTable{rules: map[string][]string{"FORWARD": {"-j A"}, "A": nil}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(filterTable{})); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}
