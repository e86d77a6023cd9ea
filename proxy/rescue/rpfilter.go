package rescue

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/notes"
)

// Values of the kernel parameter rp_filter, which checks the source addresses of packets in IPv4
// (RFC 3704). Of that of an interface and that of all, the greater one holds.
const (
	strict = 1 // answers have to leave over the interface where the packet came in
	loose  = 2 // there has to be a route back
)

// filter is rp_filter of interfaces.
var filter = notes.Parameter{Path: "ipv4/conf/*/rp_filter", Value: loose, Table: "landfall-settings",
	Prefix: "rp-filter-was-"}

// checkFilters makes the kernel take the packets that other nodes on a ring move here: where
// routers are reached over other interfaces than the nodes, a strict rp_filter drops them. So it does with
// those that nodes hand over. While no VIP has a ring, also not one with nodes that do not answer just now, and
// nothing is handed over, it sets back what it has set.
func (a *Actor) checkFilters(neighbors map[netip.Addr]links.Neighbor) {
	if a.parameters == "" {
		return
	}
	from := slices.Clone(a.handedOver())
	if len(from) == 0 && !a.ringed() && !a.exchanges(lb.IPv4) {
		a.tighten()
		a.warning(nil)
		return
	}
	for _, n := range neighbors {
		if n.Found && n.Link != 0 && !slices.Contains(from, n.Link) {
			from = append(from, n.Link)
		}
	}
	slices.Sort(from)
	a.tightened = false
	set, err := a.kernel.loosen(a.parameters, from)
	for _, name := range set {
		a.log.Info("set a kernel parameter, as other nodes move packets here that a strict filter drops", "parameter",
			"net.ipv4.conf."+name+".rp_filter", "value", loose)
	}
	a.warning(err)
	if noted := a.kernel.remember(a.parameters, a.noted); err == nil && noted != nil {
		a.filters(noted, cannotRemember)
		return
	}
	a.filters(err, "connections are lost that other nodes move here")
}

const cannotRemember = "cannot note which kernel parameters are to be set back; trying again"

// warning tells of what cannot be done, once.
func (a *Actor) warning(err error) {
	text := ""
	if err != nil {
		text = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	if text != a.warned {
		a.warned = text
		a.warn(text)
	}
}

// ringed reports whether routers spread an IPv4 address over nodes.
func (a *Actor) ringed() bool {
	for vip, o := range a.all {
		if vip.Is4() && len(o.Ring) > 0 {
			return true
		}
	}
	return false
}

// tighten sets back what was set, once.
func (a *Actor) tighten() {
	if a.tightened {
		return
	}
	reset, err := a.kernel.tighten(a.parameters, a.noted)
	for _, name := range reset {
		a.log.Info("set a kernel parameter back, as routers spread no address over nodes any more", "parameter",
			"net.ipv4.conf."+name+".rp_filter")
	}
	a.tightened = err == nil
	a.filters(err, "cannot set a kernel parameter back; trying again")
}

// filters logs an error about the parameters that is another one than before.
func (a *Actor) filters(err error, message string) {
	text := ""
	if err != nil {
		text = message + ": " + err.Error()
	}
	if text != "" && text != a.filtered {
		a.log.Warn(message, "error", err)
	}
	a.filtered = text
}

// loosen has interfaces take packets whose answers leave over another one, unless that is the
// default route's: those need nothing. folder is that of the network's parameters. It returns the
// interfaces that it has changed.
func (k Kernel) loosen(folder string, from []int) (changed []string, err error) {
	out := k.near.Uplink()
	all, err := filter.Read(folder, "all")
	if errors.Is(err, os.ErrNotExist) || err == nil && all == loose {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, link := range from {
		name, err := k.near.Name(link)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		needless := link == out || out == 0 && !lb.IsTunnel(name) // no route to clients leaves over a tunnel
		was, err := filter.Read(folder, name)
		if err != nil || needless || max(all, was) != strict {
			errs = append(errs, err)
			continue
		}
		if err := filter.Set(k.conn, folder, name, was); err != nil {
			if !errors.Is(err, os.ErrNotExist) {
				err = fmt.Errorf("net.ipv4.conf.%s.rp_filter is %d, by which the kernel drops packets that other "+
					"nodes move here, as the default route leaves over another interface; set it to %d on the node: %w", name,
					strict, loose, err)
			}
			errs = append(errs, err)
			continue
		}
		changed = append(changed, name)
	}
	// An interface that is gone, and its parameter with it, drops nothing.
	errs = slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, os.ErrNotExist) })
	return changed, errors.Join(errs...)
}

// remember has the kernel's notes and noted say the same: see notes.Parameter.
func (k Kernel) remember(folder string, noted map[string]int) error {
	return filter.Keep(k.conn, folder, noted)
}

// tighten sets back what was set, by both.
func (k Kernel) tighten(folder string, noted map[string]int) (reset []string, err error) {
	return filter.Restore(k.conn, folder, noted)
}

// ResetFilters sets back what Landfall has set of rp_filter, and forgets it. folder is that of the
// network's parameters.
func ResetFilters(folder string) (reset []string, err error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return filter.Restore(conn, folder, nil)
}
