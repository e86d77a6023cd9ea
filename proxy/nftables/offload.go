package nftables

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// flowtable takes packets of offloaded connections from all chains.
var flowtable = nft.Flowtable{Name: "established", Counted: true}

// devicesSet has the names of the flowtable's devices.
const devicesSet = "offload-devices"

// priorityOffload is behind everybody's filters (iptables' last is 50): what one of them drops is not offloaded.
const priorityOffload = 300

// flows adds the chains that add connections to the flowtable: those that our rules have translated, once both sides
// have proved to be there, and if packets of both directions come in at one of its devices. One that is forwarded
// directly is left out, as its answers leave by another node, or its packets are handed over anew with each change.
func (r *ruleset) flows(b builder, ofUDP bool) {
	r.offload = true
	r.sets = append(r.sets, set{name: devicesSet, key: []field{fieldDevice}})
	isAssured := expr.HasBits(&expr.Ct{Register: expr.Reg, Key: expr.CtKeySTATUS}, statusAssured)
	through := func(key expr.MetaKey) expr.List {
		return append(expr.List{&expr.Meta{Key: key, Register: expr.Reg}}, expr.In(devicesSet)...)
	}
	// The kernel looks up the way back with the interface where the packet came in, without a router if no route leads out
	// there. So it is asked by answers, which come from the pod: those to the client have the route that they have.
	isAnswer := expr.List{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: expr.Reg}, expr.Compare(expr.CmpOpEq, 1)}
	r.hook(chainOffload, "filter", unix.NF_INET_FORWARD, priorityOffload, b.rule("",
		expr.HasBits(expr.State(), expr.CtStateBitESTABLISHED), isTranslated(), isAssured, isAnswer,
		through(expr.MetaKeyIIFNAME), through(expr.MetaKeyOIFNAME), expr.Goto(chainOffloadFlows)))
	var rules []nft.Rule
	for _, p := range []protocol{tcp, udp} {
		if p == udp && !ofUDP {
			continue
		}
		add := expr.List{&expr.FlowOffload{Flowtable: flowtable.Name}}
		frontend := b.key(fieldOriginalDestination, fieldProtocol, fieldOriginalPort)
		if r.needs.direct() {
			rules = append(rules, b.rule("direct", b.originalGroup(setDirect, p), noPriority(), expr.Return()))
		}
		rules = append(rules,
			b.rule("", b.isProtocol(p), frontend, expr.In(setNames[setExternal]), add),
			b.rule("", b.isProtocol(p), b.key(fieldOriginalDestination), expr.In(setNames[setClusterIPs]), add))
	}
	r.add(chainOffloadFlows, rules...)
}

// Flowtables has the flowtables of both families take packets from devices. It has a socket of its own, and its methods
// are not safe for concurrent use.
type Flowtables struct{ conn *nfnetlink.Conn }

// OpenFlowtables opens the way to the network namespace of the calling thread.
func OpenFlowtables() (*Flowtables, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, err
	}
	return &Flowtables{conn}, nil
}

// Close closes the socket. The flowtables keep their devices.
func (f *Flowtables) Close() { f.conn.Close() }

// Set makes these the devices of a family's flowtable. there is false while there is none, as before the rules are
// written. A device that the kernel refuses keeps no other out, and one that has just gone is no error.
func (f *Flowtables) Set(family lb.Family, devices []string) (there bool, err error) {
	table := nft.Table{Family: family, Name: TableName}
	l := nft.Listing{Conn: f.conn, Table: table}
	var hooked, listed []string
	err = nfnetlink.Complete(func() error {
		listed = nil
		all, err := l.Flowtables()
		if hooked, there = all[flowtable.Name]; err != nil || !there {
			return err
		}
		return l.Elements(devicesSet, func(e nft.Element) { listed = append(listed, unix.ByteSliceToString(e.Key)) })
	})
	if errors.Is(err, unix.ENOENT) { // the table has gone, or is not there yet
		return false, nil
	}
	if err != nil || !there {
		return there, err
	}
	edits := deviceEdits(devices, hooked, listed)
	commit := func(edits []deviceEdit) error {
		b := nft.NewBatch(table)
		for _, e := range edits {
			e.apply(b)
		}
		return b.Commit(f.conn)
	}
	if len(edits) == 0 || commit(edits) == nil {
		return true, nil
	}
	var errs []error
	for _, e := range edits {
		if err := commit([]deviceEdit{e}); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("device %s: %w", e.name, err))
		}
	}
	return true, errors.Join(errs...)
}

// deviceEdit is what is to do for a device: in the flowtable, and in the set that the rules ask. The kernel takes a
// device that goes out of the flowtable itself.
type deviceEdit struct {
	name                     string
	hook, unhook, list, omit bool
}

// deviceEdits compares what the kernel has with what is wanted.
func deviceEdits(want, hooked, listed []string) (edits []deviceEdit) {
	all := slices.Concat(want, hooked, listed)
	slices.Sort(all)
	for _, name := range slices.Compact(all) {
		w, h, l := slices.Contains(want, name), slices.Contains(hooked, name), slices.Contains(listed, name)
		if w != h || w != l {
			edits = append(edits, deviceEdit{name: name, hook: w && !h, unhook: h && !w, list: w && !l, omit: l && !w})
		}
	}
	return edits
}

func (e deviceEdit) apply(b *nft.Batch) {
	key := make([]byte, unix.IFNAMSIZ)
	copy(key, e.name)
	element := one(nft.Element{Key: key})
	if e.hook {
		b.AddDevice(flowtable.Name, e.name)
	}
	if e.unhook {
		b.RemoveDevice(flowtable.Name, e.name)
	}
	if e.list {
		b.AddElements(devicesSet, element)
	}
	if e.omit {
		b.RemoveElements(devicesSet, element)
	}
}

// ProbeOffload does the same as Probe for the rules that offload connections, which need modules of the kernel that
// others do not.
func ProbeOffload(n *Netlink, family lb.Family) error {
	offloading := usual
	offloading.Offload = map[lb.Family]bool{family: true}
	return try(n, newRuleset(family, offloading, nil))
}
