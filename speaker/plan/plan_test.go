package plan

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	w177 = "k8s-worker-177"
	w178 = "k8s-worker-178"
	w179 = "k8s-worker-179"
)

var (
	vip     = netip.MustParseAddr("172.26.236.180")
	nginx   = lb.Key{Namespace: "default", Name: "my-nginx"}
	metrics = lb.Key{Namespace: "default", Name: "metrics"}
)

func eth0(tweak ...func(*lb.Interface)) lb.Interface {
	i := lb.Interface{
		Index: 2, Name: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, Up: true,
		Addresses: []netip.Prefix{netip.MustParsePrefix("172.26.236.178/24")},
	}
	for _, t := range tweak {
		t(&i)
	}
	return i
}

func pool(name, from, to string) lb.Pool {
	return lb.Pool{Name: name, Labels: labels.Set{"pool": name},
		Ranges: []lb.Range{{From: netip.MustParseAddr(from), To: netip.MustParseAddr(to)}}}
}

// facts returns those of a node that may announce the VIP on eth0.
func facts(self string, tweak ...func(*Facts)) Facts {
	f := Facts{
		Self: self, Node: &lb.Node{Name: self, Labels: labels.Set{"rack": "a"}}, Joined: true,
		Pools:          map[string]lb.Pool{"lan": pool("lan", "172.26.236.180", "172.26.236.199")},
		Advertisements: map[string]lb.L2Advertisement{"lan": {Name: "lan"}},
		Interfaces: []lb.Interface{eth0(), {Index: 1, Name: "lo", Up: true, Loopback: true,
			Addresses: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}}},
		Live: []string{w177, w178, w179},
	}
	for _, t := range tweak {
		t(&f)
	}
	return f
}

func delivery(service lb.Key, tweak ...func(*lb.Delivery)) *lb.Delivery {
	d := &lb.Delivery{Service: service, VIP: vip, Policy: lb.Cluster, Ready: 2, LocalReady: 1}
	for _, t := range tweak {
		t(d)
	}
	return d
}

func local(localReady, localServing, ready, serving int) func(*lb.Delivery) {
	return func(d *lb.Delivery) {
		d.Policy = lb.Local
		d.LocalReady, d.LocalServing, d.Ready, d.Serving = localReady, localServing, ready, serving
	}
}

func onTheNode(d *lb.Delivery) { d.OnNode = true }

// unforwarded has the kernel not forward what comes in at eth0.
func unforwarded(f *Facts) {
	f.CheckForwarding = true
	f.Interfaces = []lb.Interface{eth0(func(i *lb.Interface) { i.Unforwarded4 = true })}
}

func empty(d *lb.Delivery) { d.Ready, d.LocalReady = 0, 0 }

func unprogrammed(d *lb.Delivery) {
	d.Refusal = lb.Refuse(lb.ReasonNotProgrammed, "iptables-restore: exit status 4")
}

func pathless(d *lb.Delivery) {
	d.Refusal = lb.Refuse(lb.ReasonPodRouteMissing, "the kernel of n1 has no route to the endpoint 10.1.0.2")
}

func contested(d *lb.Delivery) {
	d.Refusal = lb.Refuse(lb.ReasonFrontendInUse, "192.0.2.1:80/tcp is held by a Service of another namespace")
}

func input(tweak ...func(*Input)) Input {
	in := Input{VIP: vip, Probed: true, Holders: []Holder{{Service: nginx, Delivery: delivery(nginx)}}}
	for _, t := range tweak {
		t(&in)
	}
	return in
}

func held(deliveries ...*lb.Delivery) func(*Input) {
	return func(in *Input) {
		in.Holders = nil
		for _, d := range deliveries {
			in.Holders = append(in.Holders, Holder{Service: d.Service, Delivery: d})
		}
	}
}

func TestContract1And2And10ClaimOrTypedReason(t *testing.T) {
	ad := func(tweak func(*lb.L2Advertisement)) func(*Facts) {
		return func(f *Facts) {
			a := lb.L2Advertisement{Name: "lan"}
			tweak(&a)
			f.Advertisements = map[string]lb.L2Advertisement{"lan": a}
		}
	}
	selector := func(s string) []labels.Selector {
		parsed, err := labels.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return []labels.Selector{labels.Nothing(), parsed}
	}
	both := func(a, b func(*Input)) func(*Input) { return func(in *Input) { a(in); b(in) } }
	for _, c := range []struct {
		name  string
		facts func(*Facts)
		input func(*Input)
		want  lb.Reason
	}{
		{name: "programmed with backends"},
		{name: "stopping", facts: func(f *Facts) { f.Stopping = true }, want: lb.ReasonStopping},
		{name: "node unknown", facts: func(f *Facts) { f.Node = nil }, want: lb.ReasonNodeUnknown},
		{name: "node drained", facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeDrained }, want: lb.ReasonNodeDrained},
		{name: "node leaving", facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeLeaving }, want: lb.ReasonNodeLeaving},
		{name: "node excluded", facts: func(f *Facts) { f.Node.Labels = labels.Set{LabelExclude: ""} },
			want: lb.ReasonNodeExcluded},
		{name: "node excluded, which is ignored", facts: func(f *Facts) {
			f.Node.Labels, f.IgnoreExclude = labels.Set{LabelExclude: ""}, true
		}},
		{name: "not joined", facts: func(f *Facts) { f.Joined = false }, want: lb.ReasonNotJoined},
		{name: "IPv6", facts: func(f *Facts) {
			f.Pools["six"] = pool("six", "2001:db8::1", "2001:db8::9")
			f.Interfaces = []lb.Interface{
				eth0(func(i *lb.Interface) { i.Addresses = append(i.Addresses, netip.MustParsePrefix("2001:db8::178/64")) })}
		}, input: func(in *Input) { in.VIP = netip.MustParseAddr("2001:db8::1") }},

		{name: "no pool", facts: func(f *Facts) { f.Pools = nil }, want: lb.ReasonNoAdvertisement},
		{
			name:  "outside the pools",
			facts: func(f *Facts) { f.Pools["lan"] = pool("lan", "172.26.236.190", "172.26.236.199") },
			want:  lb.ReasonNoAdvertisement},
		{name: "no advertisement", facts: func(f *Facts) { f.Advertisements = nil }, want: lb.ReasonNoAdvertisement},
		{name: "advertisement of another pool", facts: ad(func(a *lb.L2Advertisement) { a.Pools = []string{"dmz"} }),
			want: lb.ReasonNoAdvertisement},
		{name: "advertisement names the pool", facts: ad(func(a *lb.L2Advertisement) { a.Pools = []string{"dmz", "lan"} })},
		{name: "advertisement selects the pool",
			facts: ad(func(a *lb.L2Advertisement) { a.PoolSelectors = selector("pool=lan") })},
		{name: "advertisement selects other pools",
			facts: ad(func(a *lb.L2Advertisement) { a.PoolSelectors = selector("pool=dmz") }), want: lb.ReasonNoAdvertisement},
		{name: "advertisement selects the node",
			facts: ad(func(a *lb.L2Advertisement) { a.NodeSelectors = selector("rack=a") })},
		{name: "advertisement selects other nodes",
			facts: ad(func(a *lb.L2Advertisement) { a.NodeSelectors = selector("rack=b") }), want: lb.ReasonNoAdvertisement},
		{name: "advertisement names the interface",
			facts: ad(func(a *lb.L2Advertisement) { a.Interfaces = []string{"eth0"} })},
		{name: "advertisement names another interface",
			facts: ad(func(a *lb.L2Advertisement) { a.Interfaces = []string{"eth1"} }), want: lb.ReasonNoInterface},
		{name: "overlapping pools, the second one advertised", facts: func(f *Facts) {
			f.Pools["wide"] = pool("wide", "172.26.0.0", "172.26.255.255")
			f.Advertisements["lan"] = lb.L2Advertisement{Name: "lan", Pools: []string{"wide"}}
		}},

		{
			name:  "interface down",
			facts: func(f *Facts) { f.Interfaces = []lb.Interface{eth0(func(i *lb.Interface) { i.Up = false })} },
			want:  lb.ReasonNoCarrier},
		{
			name: "interface down, and another one of the subnet",
			facts: func(f *Facts) {
				f.Interfaces = []lb.Interface{eth0(func(i *lb.Interface) { i.Up, i.Name = false, "eth1" }), eth0()}
			}},
		{
			name: "interface does not forward",
			facts: func(f *Facts) {
				f.CheckForwarding = true
				f.Interfaces = []lb.Interface{eth0(func(i *lb.Interface) { i.Unforwarded4 = true })}
			},
			want: lb.ReasonForwardingOff},
		{
			name: "interface forwards the family of the VIP",
			facts: func(f *Facts) {
				f.CheckForwarding = true
				f.Interfaces = []lb.Interface{eth0(func(i *lb.Interface) { i.Unforwarded6 = true })}
			}},
		{
			name: "interface does not forward, and need not", facts: unforwarded,
			input: held(delivery(nginx, onTheNode))},
		{
			name: "interface does not forward, which another Service needs", facts: unforwarded,
			input: held(delivery(nginx, onTheNode), delivery(lb.Key{Namespace: "default", Name: "other"})),
			want:  lb.ReasonForwardingOff},
		{
			name: "interface does not forward, which a Service needs that joined", facts: unforwarded,
			input: both(held(delivery(nginx, onTheNode)), joined(joiner, delivery(joiner)))},
		{
			name: "interface does not forward, and there is no endpoint on the node", facts: unforwarded,
			input: held(delivery(nginx, local(0, 0, 2, 0))), want: lb.ReasonNoLocalBackends},
		{
			name: "interface does not forward, and the rules are not there yet", facts: unforwarded,
			input: held(delivery(nginx, unprogrammed)), want: lb.ReasonNotProgrammed},
		{
			name:  "forwarding does not count with another data plane",
			facts: func(f *Facts) { f.Interfaces = []lb.Interface{eth0(func(i *lb.Interface) { i.Unforwarded4 = true })} }},
		{name: "network unavailable", facts: func(f *Facts) { f.Node.NetworkUnavailable = true },
			want: lb.ReasonNetworkUnavailable},
		{name: "network unavailable, which does not count",
			facts: func(f *Facts) { f.Node.NetworkUnavailable, f.IgnoreNetwork = true, true }},
		{name: "node not ready", facts: func(f *Facts) { f.Node.NotReady = true }},
		{name: "node not ready, which counts", facts: func(f *Facts) { f.Node.NotReady, f.RequireReady = true, true },
			want: lb.ReasonNodeNotReady},
		{name: "no path", input: held(delivery(nginx, pathless)), want: lb.ReasonPodRouteMissing},
		{name: "interface of another subnet", facts: func(f *Facts) {
			f.Interfaces = []lb.Interface{
				eth0(func(i *lb.Interface) { i.Addresses = []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")} })}
		}, want: lb.ReasonNoInterface},
		{
			name:  "interface enslaved",
			facts: func(f *Facts) { f.Interfaces = []lb.Interface{eth0(func(i *lb.Interface) { i.Enslaved = true })} },
			want:  lb.ReasonNoInterface},
		{
			name:  "interface without ARP",
			facts: func(f *Facts) { f.Interfaces = []lb.Interface{eth0(func(i *lb.Interface) { i.NoARP = true })} },
			want:  lb.ReasonNoInterface},
		{
			name:  "interface without MAC",
			facts: func(f *Facts) { f.Interfaces = []lb.Interface{eth0(func(i *lb.Interface) { i.MAC = nil })} },
			want:  lb.ReasonNoInterface},
		{name: "no interface", facts: func(f *Facts) { f.Interfaces = nil }, want: lb.ReasonNoInterface},

		{name: "feed unknown", facts: func(f *Facts) { f.Gate = lb.ReasonFeedUnknown }, want: lb.ReasonFeedUnknown},
		{name: "feed lost", facts: func(f *Facts) { f.Gate = lb.ReasonFeedLost }, want: lb.ReasonFeedLost},
		{name: "the feed does not name it", input: func(in *Input) { in.Holders[0].Delivery = nil },
			want: lb.ReasonNotProgrammed},
		{name: "not programmed", input: held(delivery(nginx, unprogrammed)), want: lb.ReasonNotProgrammed},
		{name: "no backends", input: held(delivery(nginx, empty)), want: lb.ReasonNoBackends},
		{name: "only terminating backends, Cluster",
			input: held(delivery(nginx, empty, func(d *lb.Delivery) { d.Serving = 1 }))},
		{name: "Local, ready here", input: held(delivery(nginx, local(1, 0, 2, 0)))},
		{name: "Local, ready elsewhere only", input: held(delivery(nginx, local(0, 0, 2, 0))),
			want: lb.ReasonNoLocalBackends},
		{name: "Local, terminating here, ready elsewhere", input: held(delivery(nginx, local(0, 1, 2, 0))),
			want: lb.ReasonNoLocalBackends},
		{name: "Local, terminating here, ready nowhere", input: held(delivery(nginx, local(0, 1, 0, 1)))},
		{name: "Local, terminating elsewhere, ready nowhere", input: held(delivery(nginx, local(0, 0, 0, 1))),
			want: lb.ReasonNoLocalBackends},

		{name: "shared, both fine", input: held(delivery(metrics), delivery(nginx))},
		{name: "shared, one not programmed", input: held(delivery(metrics, unprogrammed), delivery(nginx)),
			want: lb.ReasonNotProgrammed},
		{name: "shared, one without local backends", input: held(delivery(metrics), delivery(nginx, local(0, 0, 1, 0))),
			want: lb.ReasonNoLocalBackends},
		{name: "shared, one that nobody can deliver", input: held(delivery(metrics, empty), delivery(nginx))},
		{name: "shared, one that nobody can deliver and one not here",
			input: held(delivery(metrics, empty), delivery(nginx, local(0, 0, 1, 0))), want: lb.ReasonNoLocalBackends},
		{name: "shared, none has backends", input: held(delivery(metrics, empty), delivery(nginx, empty)),
			want: lb.ReasonNoBackends},
		{name: "shared, one whose frontends the other has", input: held(delivery(metrics, contested), delivery(nginx))},
		{name: "shared, one of which the proxy has not heard", input: func(in *Input) {
			in.Holders = append(in.Holders, Holder{Service: metrics})
		}},
		{name: "shared, one unheard of and one not programmed", input: func(in *Input) {
			in.Holders = []Holder{{Service: metrics}, {Service: nginx, Delivery: delivery(nginx, unprogrammed)}}
		}, want: lb.ReasonNotProgrammed},
		{name: "shared, the proxy has heard of none", input: func(in *Input) {
			in.Holders = []Holder{{Service: metrics}, {Service: nginx}}
		}, want: lb.ReasonNotProgrammed},
		{name: "its frontends are another Service's", input: held(delivery(nginx, contested)),
			want: lb.ReasonFrontendInUse},
		{name: "shared, one contested and one not programmed",
			input: held(delivery(metrics, contested), delivery(nginx, unprogrammed)), want: lb.ReasonNotProgrammed},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, in := facts(w178), input()
			if c.facts != nil {
				c.facts(&f)
			}
			if c.input != nil {
				c.input(&in)
			}
			d := Decide(f, in)
			if got := d.Claim(false).Reason; got != c.want {
				t.Fatalf("got %q (%v), want %q", got, d.Refusal, c.want)
			}
			if c.want == "" {
				if d.Owner != w178 || !cmp.Equal(d.Answer, []string{"eth0"}) || d.Refusal != nil {
					t.Errorf("got owner %q, answer %v", d.Owner, d.Answer)
				}
				return
			}
			if d.Answer != nil || d.Owner != "" {
				t.Errorf("refused and yet owner %q answers on %v", d.Owner, d.Answer)
			}
			if d.Refusal.Message == "" || d.Refusal.Message == string(c.want) {
				t.Errorf("no sentence explains %s: %q", c.want, d.Refusal.Message)
			}
			if want := Winner(in.VIP, f.Live); d.Reporter != want {
				t.Errorf("reporter %q, want %q: somebody has to say why", d.Reporter, want)
			}
		})
	}
}

// Each reason that a plan can give has a sentence of its own, as other nodes know nothing but the
// reason.
func TestContract10EveryReasonHasASentence(t *testing.T) {
	for _, r := range []lb.Reason{
		lb.ReasonNoAdvertisement, lb.ReasonNoInterface, lb.ReasonFeedUnknown, lb.ReasonFeedLost, lb.ReasonNotProgrammed,
		lb.ReasonNoBackends,
		lb.ReasonNoLocalBackends, lb.ReasonNodeLeaving, lb.ReasonNodeDrained, lb.ReasonNodeExcluded, lb.ReasonNodeUnknown, lb.ReasonStopping,
		lb.ReasonNotJoined,
		lb.ReasonFamilyUnspoken, lb.ReasonUnheard, lb.ReasonAnnounced, lb.ReasonFrontendInUse,
	} {
		if Describe(r) == string(r) {
			t.Errorf("%s has no sentence", r)
		}
	}
}

func TestInterfacesAreTheUnionOverAdvertisements(t *testing.T) {
	f := facts(w178)
	f.Interfaces = append(f.Interfaces, eth0(func(i *lb.Interface) { i.Name, i.Addresses = "eth1", nil }),
		eth0(func(i *lb.Interface) { i.Name, i.Addresses = "eth2", nil }))
	f.Advertisements["second"] = lb.L2Advertisement{Name: "second", Interfaces: []string{"eth1", "eth9"}}
	if d := Decide(f, input()); !cmp.Equal(d.Answer, []string{"eth0", "eth1"}) {
		t.Errorf("got %v, %v", d.Answer, d.Refusal)
	}
}

// owner of vip among the three workers, and the others in order of weight.
func ranking() (owner, second, third string) {
	owner = Winner(vip, []string{w177, w178, w179})
	var rest []string
	for _, n := range []string{w177, w178, w179} {
		if n != owner {
			rest = append(rest, n)
		}
	}
	second = Winner(vip, rest)
	for _, n := range rest {
		if n != second {
			third = n
		}
	}
	return owner, second, third
}

func TestContract5MakeBeforeBreak(t *testing.T) {
	owner, second, _ := ranking()
	answering := func(in *Input) { in.Answering = []string{"eth0"} }
	former := func(in *Input) { in.Restarted = true }
	fresh := func(in *Input) { in.Fresh = true }
	preferred := func(f *Facts) {
		f.Advertisements["lan"] = lb.L2Advertisement{Name: "lan",
			Preferred: []lb.Preference{{Weight: 10, Nodes: labels.Everything()}}}
	}
	others := func(node string, claim Claim) func(*Input) {
		return func(in *Input) { in.Claims = map[string]Claim{node: claim} }
	}
	for _, c := range []struct {
		name     string
		self     string
		facts    func(*Facts)
		input    []func(*Input)
		answer   bool
		handover bool
		overlap  bool
	}{
		{name: "who would have won leaves alone what is served well", self: owner,
			input: []func(*Input){others(second, Claim{Answering: true})}},
		{name: "unless it is preferred, and takes over at once", self: owner, facts: preferred,
			input: []func(*Input){others(second, Claim{Answering: true})}, answer: true, overlap: true},
		{name: "unless who serves it is about to stop", self: owner,
			input: []func(*Input){others(second, Claim{Answering: true, Reason: lb.ReasonStopping})}, answer: true,
			overlap: true},
		{name: "of two that answer, one wins", self: owner,
			input: []func(*Input){answering, others(second, Claim{Answering: true})}, answer: true, overlap: true},
		{name: "who is expected back is waited for", self: owner,
			input: []func(*Input){others(second, Claim{Answering: true, Held: true})}, overlap: false},
		{name: "who is back goes on where it was", self: second, input: []func(*Input){former, others(owner, Claim{})},
			answer: true},
		{name: "unless another one serves it by now", self: second,
			input: []func(*Input){former, others(owner, Claim{Answering: true})}},
		{name: "a fresh address is left to the winner that has not heard of it", self: second, input: []func(*Input){fresh}},
		{name: "a fresh address is taken when the winner cannot", self: second,
			input: []func(*Input){fresh, others(owner, Claim{Reason: lb.ReasonNoLocalBackends})}, answer: true},
		{name: "not owner and not answering", self: second, input: []func(*Input){others(owner, Claim{})}},
		{name: "old owner goes on until the new one answers", self: second,
			input: []func(*Input){answering, others(owner, Claim{Weight: 1})}, answer: true, handover: true},
		{name: "old owner ends once the new one answers", self: second,
			input: []func(*Input){answering, others(owner, Claim{Answering: true, Weight: 1})}},
		{name: "stopping, the heir does not answer yet", self: owner, facts: func(f *Facts) { f.Stopping = true },
			input: []func(*Input){answering, others(second, Claim{})}, answer: true, handover: true},
		{name: "stopping, the heir answers", self: owner, facts: func(f *Facts) { f.Stopping = true },
			input: []func(*Input){answering, others(second, Claim{Answering: true})}},
		{name: "stopping without an heir", self: owner, facts: func(f *Facts) { f.Stopping = true },
			input: []func(*Input){answering, others(second, Claim{Reason: lb.ReasonNoBackends})}},
		{name: "node leaving without an heir", self: owner, facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeLeaving },
			input: []func(*Input){answering, others(second, Claim{Reason: lb.ReasonNoLocalBackends})}, answer: true,
			handover: true},
		{name: "node drained without an heir", self: owner, facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeDrained },
			input: []func(*Input){answering, others(second, Claim{Reason: lb.ReasonNoLocalBackends})}, answer: true,
			handover: true},
		{name: "node drained without an heir, and the majority that it does not see answers", self: owner,
			facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeDrained },
			input: []func(*Input){answering, func(in *Input) { in.Elsewhere = true }}},
		{name: "node drained, and its interface loses the carrier", self: owner, facts: func(f *Facts) {
			f.Node.Leaving, f.Interfaces = lb.ReasonNodeDrained, slices.Clone(f.Interfaces)
			for i := range f.Interfaces {
				f.Interfaces[i].Up = false
			}
		}, input: []func(*Input){answering, others(second, Claim{})}},
		{name: "last local endpoint is terminating, no heir yet", self: owner,
			input: []func(*Input){answering, held(delivery(nginx, local(0, 1, 1, 0)))}, answer: true, handover: true},
		{name: "last local endpoint is terminating, and the majority that it does not see answers", self: owner,
			input: []func(*Input){answering, func(in *Input) { in.Elsewhere = true },
				held(delivery(nginx, local(0, 1, 1, 0)))}},
		{name: "last local endpoint is terminating, and the interface does not forward", self: owner, facts: unforwarded,
			input: []func(*Input){answering, held(delivery(nginx, local(0, 1, 1, 0)))}},
		{name: "last local endpoint is terminating, on the node itself", self: owner, facts: unforwarded,
			input: []func(*Input){answering, held(delivery(nginx, local(0, 1, 1, 0), onTheNode))}, answer: true, handover: true},
		{name: "node drained, and the interface does not forward", self: owner, facts: func(f *Facts) {
			unforwarded(f)
			f.Node.Leaving = lb.ReasonNodeDrained
		}, input: []func(*Input){answering, others(second, Claim{})}},
		{name: "label set without an heir", self: owner,
			facts: func(f *Facts) { f.Node.Labels = labels.Set{LabelExclude: "true"} }, input: []func(*Input){answering}},
		{name: "node leaving", self: owner, facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeLeaving },
			input: []func(*Input){answering, others(second, Claim{})}, answer: true, handover: true},
		{name: "label set", self: owner, facts: func(f *Facts) { f.Node.Labels = labels.Set{LabelExclude: "true"} },
			input: []func(*Input){answering, others(second, Claim{})}, answer: true, handover: true},
		{name: "advertisement moved away", self: owner, facts: func(f *Facts) { f.Advertisements = nil },
			input: []func(*Input){answering, others(second, Claim{})}, answer: true, handover: true},
		{name: "last local endpoint is terminating", self: owner,
			input: []func(*Input){answering, others(second, Claim{}), held(delivery(nginx, local(0, 1, 1, 0)))}, answer: true,
			handover: true},
		{name: "last local endpoint is gone", self: owner,
			input: []func(*Input){answering, others(second, Claim{}), held(delivery(nginx, local(0, 0, 1, 0)))}},
		{name: "rules gone", self: owner, input: []func(*Input){answering, others(second, Claim{}),
			held(delivery(nginx, unprogrammed))}},
		{name: "stopping and rules gone", self: owner, facts: func(f *Facts) { f.Stopping = true },
			input: []func(*Input){answering, others(second, Claim{}), held(delivery(nginx, unprogrammed))}},
		{name: "feed lost", self: owner, facts: func(f *Facts) { f.Gate = lb.ReasonFeedLost },
			input: []func(*Input){answering, others(second, Claim{})}},
		{name: "interface down", self: owner, facts: func(f *Facts) { f.Interfaces = nil },
			input: []func(*Input){answering, others(second, Claim{})}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := facts(c.self)
			if c.facts != nil {
				c.facts(&f)
			}
			d := Decide(f, input(c.input...))
			if got := len(d.Answer) > 0; got != c.answer || d.Handover != c.handover || d.Overlap != c.overlap {
				t.Errorf("answers on %v, handover %v, overlap %v; want %v, %v, %v", d.Answer, d.Handover, d.Overlap, c.answer,
					c.handover, c.overlap)
			}
		})
	}
}

func TestContract10WordsAndSummary(t *testing.T) {
	owner, second, third := ranking()
	byNode := func(d Decision) map[string]lb.Reason {
		m := map[string]lb.Reason{}
		for _, w := range d.Nodes() {
			m[w.Node] = w.Reason
		}
		return m
	}
	in := input(func(in *Input) {
		in.Answering = []string{"eth0"}
		in.Claims = map[string]Claim{second: {}, third: {Reason: lb.ReasonNoLocalBackends}}
	})
	d := Decide(facts(owner), in)
	if diff := cmp.Diff(map[string]lb.Reason{owner: lb.ReasonAnnounced, second: lb.ReasonNotOwner,
		third: lb.ReasonNoLocalBackends}, byNode(d)); diff != "" {
		t.Error(diff)
	}
	report, ok := Summarize(owner, []Decision{d})
	wantReport(t, report, ok, Report{Announced: true, Reason: lb.ReasonAnnounced,
		Message: "172.26.236.180 is announced from " + owner + " (ARP on eth0)"},
		lb.Announcement{Reason: lb.ReasonAnnounced, Owner: owner, Protocol: "ARP", Interfaces: []string{"eth0"}})
	if _, ok := Summarize(second, []Decision{d}); ok {
		t.Error("a node that is not the reporter reports")
	}

	in = input(func(in *Input) { in.Claims = map[string]Claim{third: {Reason: lb.ReasonFeedUnknown}} },
		held(delivery(nginx, local(0, 0, 1, 0))))
	d = Decide(facts(owner), in)
	if diff := cmp.Diff(map[string]lb.Reason{owner: lb.ReasonNoLocalBackends, second: lb.ReasonUnheard,
		third: lb.ReasonFeedUnknown}, byNode(d)); diff != "" {
		t.Error(diff)
	}
	report, ok = Summarize(owner, []Decision{d})
	wantReport(t, report, ok, Report{Reason: lb.ReasonNoOwner,
		Message: "no node announces 172.26.236.180: FeedUnknown on " +
			third + ", NoLocalBackends on " + owner + ", Unheard on " + second},
		lb.Announcement{Reason: lb.ReasonNoOwner})

	in = input(func(in *Input) {
		in.Claims = map[string]Claim{second: {Reason: lb.ReasonNoBackends}, third: {Reason: lb.ReasonNoBackends}}
	}, held(delivery(nginx, empty)))
	report, ok = Summarize(owner, []Decision{Decide(facts(owner), in)})
	wantReport(t, report, ok, Report{Reason: lb.ReasonNoBackends,
		Message: "no node announces 172.26.236.180: default/my-nginx: no endpoint is usable on any node"},
		lb.Announcement{Reason: lb.ReasonNoBackends})

	// A node that is out by itself does not hide what keeps the others from announcing.
	in.Claims[third] = Claim{Reason: lb.ReasonNodeExcluded}
	report, ok = Summarize(owner, []Decision{Decide(facts(owner), in)})
	wantReport(t, report, ok, Report{Reason: lb.ReasonNoBackends,
		Message: "no node announces 172.26.236.180: default/my-nginx: no endpoint is usable on any node (" +
			"NoBackends on " + owner + ", " + second + ", NodeExcluded on " + third + ")"},
		lb.Announcement{Reason: lb.ReasonNoBackends})

	// Over BGP alone, what nodes announce that drain is no word of ARP, and both are named.
	drained := facts(owner, func(f *Facts) { f.Node.Leaving = lb.ReasonNodeDrained })
	in = input(func(in *Input) {
		in.Routed = Routed{Peers: []string{"tor-1"}, Refusal: lb.Refuse(lb.ReasonNodeDrained, "drained"), Lingers: true}
		in.Claims = map[string]Claim{
			second: {Reason: lb.ReasonNodeDrained, Routes: "tor-1", Unrouted: lb.ReasonNodeDrained},
			third:  {Reason: lb.ReasonNoLocalBackends, Unrouted: lb.ReasonNoLocalBackends}}
	})
	both := []string{owner, second}
	slices.Sort(both)
	route := []lb.RouteAnnouncement{{Peers: []string{"tor-1"}, Nodes: both}}
	report, ok = Summarize(third, []Decision{reportedBy(third, Decide(drained, in))})
	wantReport(t, report, ok, Report{Announced: true, Reason: lb.ReasonParting,
		Message: "172.26.236.180 is announced from " + strings.Join(both, ", ") +
			" (BGP to tor-1), although those nodes should not announce it (NodeDrained): " +
			"no other node can take it over"},
		lb.Announcement{Reason: lb.ReasonParting, Routes: route})
	in.Answering = []string{"eth0"}
	report, ok = Summarize(third, []Decision{reportedBy(third, Decide(drained, in))})
	wantReport(t, report, ok, Report{Announced: true, Reason: lb.ReasonParting,
		Message: "172.26.236.180 is announced from " + owner + " and from " + strings.Join(both, ", ") +
			" (BGP to tor-1), although those nodes should not announce it (NodeDrained): " +
			"no other node can take it over"},
		lb.Announcement{Reason: lb.ReasonParting, Owner: owner, Protocol: "ARP", Routes: route})

	report, _ = Summarize(owner, []Decision{Decide(facts(owner), input())})
	if report.Announced || report.Reason != lb.ReasonAnnounceFailed {
		t.Errorf("an owner that does not answer is reported as %+v", report)
	}
	d = Decide(facts(owner), input())
	d.Flapping = true
	report, _ = Summarize(owner, []Decision{d})
	if report.Announced || report.Reason != lb.ReasonFlapping ||
		!strings.Contains(report.Message, "its next announcement") {
		t.Errorf("an owner whose announcement waits is reported as %+v", report)
	}
}

// reportedBy is the decision where that node reports on it.
func reportedBy(node string, d Decision) Decision {
	d.Reporter = node
	return d
}

// wantReport compares a report on one VIP; the announcement wanted comes without the VIP.
func wantReport(t *testing.T, got Report, ok bool, want Report, announcement lb.Announcement) {
	t.Helper()
	announcement.VIP = vip
	want.Announcements = []lb.Announcement{announcement}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); !ok || diff != "" {
		t.Errorf("reports %v (-want +got):\n%s", ok, diff)
	}
}

// TestFewThingsAreKeptOfManyNodes has a third of many nodes say something else than most, and one something else again:
// each thing that is said is kept once, and what each node says is known.
func TestFewThingsAreKeptOfManyNodes(t *testing.T) {
	d, f := Decision{VIP: vip, Owner: "n000"}, Facts{Self: "n000"}
	for i := range 300 {
		f.Live = append(f.Live, fmt.Sprintf("n%03d", (i+100)%300)) // in any order
	}
	says := func(node string) saying {
		switch {
		case node == d.Owner:
			return saying{told: true, claim: Claim{Answering: true}}
		case node[3]%3 == 0:
			return saying{told: true, claim: Claim{Reason: lb.ReasonNoBackends}}
		}
		return saying{told: true}
	}
	d.said = sayingsBy(f, says)
	if len(d.said.kinds) != 3 {
		t.Errorf("kept are %+v", d.said.kinds)
	}
	for i, node := range f.Live {
		if got := d.said.of(i); got != says(node) {
			t.Errorf("%s says %+v, kept is %+v", node, says(node), got)
		}
		if status, ok := d.Node(node); !ok || status.Node != node || status.Answering != says(node).claim.Answering {
			t.Errorf("the status of %s is %+v, %v", node, status, ok)
		}
	}
	if !d.Served() {
		t.Error("it is not served")
	}
}

// TestRoutesAreReportedAsData has racks of nodes announce a VIP, each to its own routers, beside
// one that answers ARP.
func TestRoutesAreReportedAsData(t *testing.T) {
	d := Decision{VIP: vip, Reporter: "n000", Owner: "n001"}
	f := Facts{Self: "n000"}
	for i := range 100 {
		f.Live = append(f.Live, fmt.Sprintf("n%03d", i))
	}
	d.said = sayingsBy(f, func(node string) saying {
		rack := node[1:3]
		return saying{told: true, claim: Claim{Answering: node == d.Owner,
			Routes: NewPeerNames("tor-"+rack+"a", "tor-"+rack+"b")}}
	})
	report, ok := Summarize("n000", []Decision{d})
	if !ok || len(report.Announcements) != 1 {
		t.Fatalf("reports %+v", report)
	}
	a := report.Announcements[0]
	if a.Owner != "n001" || a.Protocol != "ARP" || len(a.Interfaces) > 0 || len(a.Routes) != 10 ||
		!slices.Equal(a.Routes[1].Peers, []string{"tor-01a", "tor-01b"}) || len(a.Routes[1].Nodes) != 10 {
		t.Errorf("announcement %+v", a)
	}
	for _, want := range []string{
		"172.26.236.180 is announced from n001; ",
		"n010, n011, n012, n013, n014, n015, n016 and 3 more (BGP to tor-01a, tor-01b)",
		"; 172.26.236.180 is announced from 20 more nodes to other BGP peers",
	} {
		if !strings.Contains(report.Message, want) {
			t.Errorf("message %q lacks %q", report.Message, want)
		}
	}
	// The data is bounded as it is written, and counts every node.
	written, err := lb.DecodeAnnouncements(report.Status().Announcements)
	if err != nil || len(written[0].Routes) != lb.MaxNamedNodes || written[0].OtherNodes != 20 ||
		written[0].Routes[0].OtherNodes != 2 {
		t.Errorf("written as %+v, %v", written, err)
	}
}

// TestContract11AReportHasABound has each node announce the VIPs of a Service to peers of its own, many of them with
// long names: what is written to the Service is no more than the API server takes from a node.
func TestContract11AReportHasABound(t *testing.T) {
	var decisions []Decision
	for i := range lb.MaxAddresses {
		d := Decision{VIP: netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), Reporter: "n000"}
		f, routes := Facts{Self: "n000"}, map[string]PeerNames{}
		for n := range 16 {
			node := fmt.Sprintf("n%03d", n)
			var peers []string
			for p := range 100 {
				peers = append(peers, fmt.Sprintf("rack-%d-%d-%s", n/2, p, strings.Repeat("x", 200)))
			}
			f.Live, routes[node] = append(f.Live, node), NewPeerNames(peers...)
		}
		d.said = sayingsBy(f, func(node string) saying { return saying{told: true, claim: Claim{Routes: routes[node]}} })
		decisions = append(decisions, d)
	}
	report, ok := Summarize("n000", decisions)
	if most := lb.MaxAddresses * lb.MaxNamedNodes * (lb.MaxNamedNodes + 1) * 256; !ok || len(report.Message) > most {
		t.Errorf("a report of %d bytes, want at most %d", len(report.Message), most)
	}
	if said := report.Status(); len(said.Condition.Message) != lb.MaxMessage ||
		!strings.HasSuffix(said.Condition.Message, "...") || len(said.Announcements) > lb.MaxAnnouncementsSize {
		t.Errorf("written are %d and %d bytes", len(said.Condition.Message), len(said.Announcements))
	}
	report.Message = strings.Repeat("ä", lb.MaxMessage)
	if message := report.Status().Condition.Message; len(message) > lb.MaxMessage || !utf8.ValidString(message) {
		t.Errorf("%d bytes of text that is none", len(message))
	}
}
