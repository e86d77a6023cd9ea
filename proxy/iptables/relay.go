package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// ChainRelay is the chain that sends connections to the relay.
const ChainRelay = chainRelay

// relay renders what sends connections to relayed frontends to the relay, as long as that is leased. Those of the node
// itself go on: the relay's own would come back to it where an endpoint is an address of a relayed Service. So do those
// that come in through a VRF: the relay's sockets are in none, and the kernel would refuse them.
//
// Lists of the match recent are the only thing with a time that rules can ask about and a program can write. The mask
// makes one of all clients, which a Lease writes into the list.
func (r renderer) relay() []string {
	to, ok := r.config.RelayTo[r.family]
	if !ok {
		return []string{}
	}
	leased := fmt.Sprintf("-m recent --rcheck --seconds %d --name %s --mask %s --rsource",
		int(plan.RelayLease/time.Second), leaseOf(to), everyoneOf(r.family))
	rules := []string{rule{match: fromLocalAddress, target: "RETURN"}.String()}
	for _, name := range r.config.VRFInterfaces {
		rules = append(rules, rule{in: name, target: "RETURN"}.String())
	}
	return append(rules, rule{protocol: lb.TCP, comment: "landfall: to the relay of this node", match: leased,
		portless: true, target: "DNAT --to-destination " + to.String()}.String())
}

// isRelayed reports whether the rules send connections to a frontend to the relay. UDP stays with the rules.
func (r renderer) isRelayed(s plan.Service, p plan.Port, f plan.Frontend) bool {
	return r.config.Relay && p.Protocol == lb.TCP && s.IsRelayed(p, f)
}

// ProbeRelay returns an error if the kernel does not take a rule that asks for a lease, as it would refuse all
// rules that are written with it, or if the lease cannot be written, as where /proc is read-only. It makes a chain
// with such a rule, and removes it.
func ProbeRelay(ctx context.Context, k Kernel, family lb.Family) error {
	const chain = prefix + "PROBE"
	made := fmt.Sprintf("*nat\n:%s - [0:0]\n"+
		"-A %s -m recent --rcheck --seconds 1 --name %s --mask %s --rsource -j RETURN\nCOMMIT\n",
		chain, chain, chain, everyoneOf(family))
	if err := k.Restore(ctx, made); err != nil {
		return fmt.Errorf("make a rule with the match recent: %w", err)
	}
	err := write(chain, "+", family)
	if err != nil {
		err = fmt.Errorf("write a list of the match recent: %w", err)
	}
	return errors.Join(err, k.Restore(ctx, fmt.Sprintf("*nat\n-F %s\n-X %s\nCOMMIT\n", chain, chain)))
}

// everyoneOf returns what stands for all clients.
func everyoneOf(family lb.Family) netip.Addr {
	if family == lb.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// leases begins the names of lists that are leases.
const leases = chainRelay + "-"

// leaseOf names the list that is the lease of an address and port. What was leased for another leads nowhere.
func leaseOf(to netip.AddrPort) string { return fmt.Sprint(leases, to.Addr(), "-", to.Port()) }

// Lease has the rules lead to the node's relay for a while. Its methods are not safe for concurrent use, and write to
// the network namespace of the calling thread.
type Lease struct {
	last map[lb.Family]string // the list that was written last
}

// NewLease returns a Lease.
func NewLease() *Lease { return &Lease{map[lb.Family]string{}} }

// lists is where the kernel has the lists of the match recent.
const lists = "/proc/thread-self/net/xt_recent"

// Renew has the rules lead TCP connections that are relayed to an address and port of this node, for plan.RelayLease
// from now, in place of what was leased before. It fails with fs.ErrNotExist if no rule leads there.
func (l *Lease) Renew(way plan.RelayWay, to netip.AddrPort, _ time.Duration) error {
	if way.Protocol != lb.TCP || lb.FamilyOf(to.Addr()) != way.Family {
		return fmt.Errorf("lead %s of %s to the relay: no rule leads it to %s", way.Protocol, way.Family, to)
	}
	list := leaseOf(to)
	if l.last[way.Family] != list {
		if err := end(way.Family, list); err != nil {
			return err
		}
		l.last[way.Family] = list
	}
	if err := write(list, "+", way.Family); err != nil {
		return fmt.Errorf("lead %s of %s to the relay: %w", way.Protocol, way.Family, err)
	}
	return nil
}

// End has the rules lead to no relay, whoever leased it.
func (l *Lease) End(way plan.RelayWay) error {
	if way.Protocol != lb.TCP {
		return nil
	}
	delete(l.last, way.Family)
	return end(way.Family, "")
}

// end ends all leases of a family but one.
func end(family lb.Family, but string) error {
	entries, err := os.ReadDir(lists)
	if errors.Is(err, fs.ErrNotExist) { // the kernel's module is not loaded
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), leases)
		if !ok || e.Name() == but || strings.Contains(name, ":") != (family == lb.IPv6) {
			continue
		}
		if err := write(e.Name(), "-", family); !errors.Is(err, fs.ErrNotExist) { // its rule is gone
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("lead TCP of %s to no relay: %w", family, err)
	}
	return nil
}

// write adds all clients to a list, or removes them.
func write(list, does string, family lb.Family) error {
	file, err := os.OpenFile(filepath.Join(lists, list), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(does + everyoneOf(family).String())
	return errors.Join(err, file.Close())
}
