package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// ipvsInterface is where kube-proxy in mode ipvs puts the addresses of all Services.
const ipvsInterface = "kube-ipvs0"

// unheardFor is how long a speaker may look for the others before that is remarkable. It takes
// about a minute until the API server says of the pods on a node that is down that they are not ready:
// kube-controller-manager's --node-monitor-grace-period of 50 s, its period of 5 s, and the DaemonSet's status.
const unheardFor = 90 * time.Second

// Host is what a speaker sees of its node and its cluster that decides whether its announcements
// make sense.
type Host struct {
	Self          string
	Nodes         map[string]lb.Node
	IgnoreExclude bool
	Interfaces    []lb.Interface
	// AnswersAll is set while the kernel answers ARP for the addresses of all its interfaces on each
	// of them (arp_ignore=0).
	AnswersAll bool
	// Holds are the addresses of Services that interfaces of the node have, in order, by interface.
	Holds map[string][]netip.Addr
	// Unheard is for how long more speakers were ready than this one hears.
	Unheard  time.Duration
	Ready    int // speakers, as the API server says
	Speakers Speakers
	Port     uint16 // of gossip
	// Unreachable says why the node does not reach the API server; "" if it does.
	Unreachable string
	// Conflicts are the conflicting hosts that this node has seen lately, by VIP.
	Conflicts map[netip.Addr][]ConflictingHost
	// Answering are the interfaces on which the node answers for IPv4 addresses of Services, Strict those
	// of them whose rp_filter has answers leave where the packet came in (RFC 3704).
	Answering []string
	Strict    map[string]bool
	// Uplink is where packets to the rest of the world leave; "" if that is not certain.
	Uplink string
}

// Findings says what keeps announcements of the node from clients.
func Findings(h Host) []lb.Finding {
	return slices.Concat(h.unreachable(), h.excluded(), h.answers(), h.holds(), h.unheard(), h.strict(), h.conflicts())
}

// excluded names the label that keeps the node from announcing: on purpose, unless no node is
// without it.
func (h Host) excluded() []lb.Finding {
	if _, has := h.Nodes[h.Self].Labels[LabelExclude]; !has || h.IgnoreExclude {
		return nil
	}
	free := 0
	for _, n := range h.Nodes {
		if _, has := n.Labels[LabelExclude]; !has {
			free++
		}
	}
	if free > 0 {
		f := lb.Find(lb.ReasonNodeExcluded, "%s announces no address, as it carries the label %s; other nodes do", h.Self,
			LabelExclude)
		f.Note = true
		return []lb.Finding{f}
	}
	return []lb.Finding{lb.Find(lb.ReasonNodeExcluded,
		"%s announces no address, and neither does any other node: all carry "+
			"the label %s, as kubeadm and Talos set it on control planes; remove the label, or set --ignore-exclude-lb (chart: "+
			"speaker.ignoreExcludeLB=true)", h.Self, LabelExclude)}
}

// answers finds a kernel that answers ARP for addresses of Services, whatever the speaker decides.
func (h Host) answers() []lb.Finding {
	i := slices.IndexFunc(h.Interfaces, func(i lb.Interface) bool { return i.Name == ipvsInterface })
	if i < 0 || len(h.Interfaces[i].Addresses) == 0 || !h.AnswersAll {
		return nil
	}
	return []lb.Finding{lb.Find(lb.ReasonARPNotStrict,
		"%s answers ARP for all addresses of Services, which kube-proxy in mode "+
			"ipvs has put on %s, so clients reach any node: set ipvs.strictARP=true in kube-proxy's configuration", h.Self,
		ipvsInterface)}
}

// holds finds addresses of Services on interfaces of the node, for which its kernel answers too. Those of
// kube-proxy are found by answers, and those of Nodes belong there.
func (h Host) holds() (found []lb.Finding) {
	for _, i := range h.Interfaces {
		answered := slices.DeleteFunc(slices.Clone(h.Holds[i.Name]), func(addr netip.Addr) bool {
			elsewhere := !h.AnswersAll || !addr.Is4() // the kernel answers on the interface that has the address alone
			return elsewhere && (i.Loopback || i.NoARP) || slices.Contains(h.Nodes[h.Self].Addresses, addr)
		})
		if len(answered) == 0 || i.Name == ipvsInterface {
			continue
		}
		found = append(found, lb.Find(lb.ReasonAddressOnNode,
			"interface %s of %s has %s, so its kernel answers for what only the owner may: find what has put it there, such as "+
				"keepalived, and remove it", i.Name, h.Self, listAddresses(answered)).About(i.Name))
	}
	return found
}

// listAddresses names the first of some addresses of Services.
func listAddresses(vips []netip.Addr) string {
	names := make([]string, len(vips))
	for i, vip := range vips {
		names[i] = vip.String()
	}
	return firstOf(names, maxNamedVIPs)
}

// strict finds interfaces whose kernel drops what clients behind a router send to addresses of
// Services.
func (h Host) strict() (found []lb.Finding) {
	for _, name := range h.Answering {
		if h.Strict[name] && h.Uplink != "" && h.Uplink != name {
			found = append(found, lb.Find(lb.ReasonStrictReversePath,
				"%[1]s answers for addresses of Services on %[2]s, where its kernel drops what clients behind a router send, as "+
					"the default route leaves over %[3]s and rp_filter is strict: set net.ipv4.conf.%[2]s.rp_filter to 2", h.Self,
				name, h.Uplink).About(name))
		}
	}
	return found
}

// unreachable finds a node that works with what it knew of the cluster when it was cut off.
func (h Host) unreachable() []lb.Finding {
	if h.Unreachable == "" {
		return nil
	}
	return []lb.Finding{lb.Find(lb.ReasonAPIServerUnreachable,
		"%s does not reach the API server, and knows of no change since: %s", h.Self, h.Unreachable)}
}

// unheard finds speakers that are ready and that this one does not hear.
func (h Host) unheard() []lb.Finding {
	if h.Unheard < unheardFor {
		return nil
	}
	ends := fmt.Sprintf("open TCP and UDP port %d between all nodes, and give all the same gossip key", h.Port)
	switch live := len(h.Speakers.Live); {
	case len(h.Speakers.Missing) > 0: // some of which may be down
		return []lb.Finding{lb.Find(lb.ReasonGossipBlocked,
			"the speaker on %s hears %d of %d ready speakers, itself included, and no longer hears %s: %s", h.Self, live,
			h.Ready, firstOf(h.Speakers.Missing, maxMissing), ends)}
	case live < 2:
		return []lb.Finding{lb.Find(lb.ReasonGossipBlocked,
			"the speaker on %s has met no other, although speakers on other nodes are ready: %s", h.Self, ends)}
	default:
		return []lb.Finding{lb.Find(lb.ReasonGossipBlocked,
			"the speaker on %s has met %d of %d ready speakers, itself included: %s", h.Self, live, h.Ready, ends)}
	}
}

// maxMissing is how many nodes a finding names.
const maxMissing = 3

// firstOf lists the first of many.
func firstOf(all []string, most int) string {
	text := strings.Join(all[:min(len(all), most)], ", ")
	if more := len(all) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// Bounds of findings about conflicting hosts: another cluster may use every address.
const (
	maxConflicts = 10 // findings
	maxNamedVIPs = 3  // addresses that a finding names
)

// conflicts has one finding for each conflicting host, with the addresses that it uses.
func (h Host) conflicts() (found []lb.Finding) {
	uses := map[string][]netip.Addr{}
	for vip, hosts := range h.Conflicts {
		for _, host := range hosts {
			uses[host.String()] = append(uses[host.String()], vip)
		}
	}
	for _, host := range slices.Sorted(maps.Keys(uses)) {
		if len(found) == maxConflicts {
			return append(found, lb.Find(lb.ReasonAddressConflict,
				"%s sees %d more hosts that use addresses of Services%s", h.Self, len(uses)-maxConflicts,
				h.sameRange()).About("more"))
		}
		vips := uses[host]
		slices.SortFunc(vips, netip.Addr.Compare)
		found = append(found, lb.Find(lb.ReasonAddressConflict,
			"%s, %s of %s%s, uses addresses of Services: %s%s", h.stranger(), host, h.Self, virtualRouter(host),
			listAddresses(vips), h.sameRange()).About(host))
	}
	return found
}

// alone reports whether the speaker hears no other in a cluster of several nodes: it knows the MAC addresses of none.
func (h Host) alone() bool { return len(h.Speakers.Live) == 1 && len(h.Nodes) > 1 }

// stranger says what a conflicting host is.
func (h Host) stranger() string {
	if h.alone() {
		return "a host"
	}
	return "a host outside of the cluster"
}

// sameRange names what uses several addresses of Services, as a device that was given one by mistake
// does not.
func (h Host) sameRange() string {
	if h.alone() {
		return fmt.Sprintf("; it may be a node whose speaker this one does not hear: open TCP and UDP port %d between all "+
			"nodes, also in filters that reject", h.Port)
	}
	if len(h.Conflicts) > 1 {
		return "; another cluster or load balancer seems to have the same range: give each a range of its own"
	}
	return "; give it another address, or leave this one out of the pool with excludedAddresses"
}

// virtualRouter names the owner of a MAC address of RFC 9568 (VRRP), section 7.3.
func virtualRouter(mac string) string {
	var version, id int
	if n, _ := fmt.Sscanf(mac, "00:00:5e:00:%02x:%02x", &version, &id); n == 2 && (version == 1 || version == 2) {
		return fmt.Sprintf(" (the virtual router %d of VRRP, such as keepalived)", id)
	}
	return ""
}
