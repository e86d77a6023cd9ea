package rescue

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// Values of the kernel parameter rp_filter, which checks the source addresses of packets in IPv4
// (RFC 3704). Of that of an interface and that of all, the greater one holds.
const (
	strict = 1 // answers have to leave over the interface where the packet came in
	loose  = 2 // there has to be a route back
)

// settingsTable has the interfaces of which Landfall has changed rp_filter, in a set for each value
// that it had. Like the parameter itself, it is gone when the node starts again. Others may flush it:
// so the actor remembers what it says, and writes it again.
var settingsTable = nft.Table{Family: lb.IPv4, Name: "landfall-settings"}

func changedSet(was int) nft.Set {
	return nft.Set{Name: fmt.Sprintf("rp-filter-was-%d", was), KeyType: nft.TypeIfname, KeyLength: unix.IFNAMSIZ}
}

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
	if err := a.kernel.remember(a.parameters, a.noted); err != nil {
		a.filters(err, cannotRemember)
		return
	}
	reset, err := a.kernel.tighten(a.parameters)
	for _, name := range reset {
		a.log.Info("set a kernel parameter back, as routers spread no address over nodes any more", "parameter",
			"net.ipv4.conf."+name+".rp_filter")
	}
	if a.tightened = err == nil; a.tightened {
		clear(a.noted)
	}
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

func filterOf(folder, iface string) string {
	return filepath.Join(folder, "ipv4", "conf", iface, "rp_filter")
}

func readFilter(folder, iface string) (int, error) {
	text, err := os.ReadFile(filterOf(folder, iface))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// writeFilter changes the value of an interface. before is called once it is certain that this may
// be written.
func writeFilter(folder, iface string, value int, before func() error) error {
	f, err := os.OpenFile(filterOf(folder, iface), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := before(); err != nil {
		return err
	}
	_, err = f.WriteString(strconv.Itoa(value) + "\n")
	return err
}

// loosen has interfaces take packets whose answers leave over another one, unless that is the
// default route's: those need nothing. folder is that of the network's parameters. It returns the
// interfaces that it has changed.
func (k Kernel) loosen(folder string, from []int) (changed []string, err error) {
	out := k.near.Uplink()
	all, err := readFilter(folder, "all")
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
		was, err := readFilter(folder, name)
		if err != nil || needless || max(all, was) != strict {
			errs = append(errs, err)
			continue
		}
		err = writeFilter(folder, name, loose, func() error { return k.noteFilter(name, was) })
		if err != nil {
			if !errors.Is(err, os.ErrNotExist) {
				err = fmt.Errorf("net.ipv4.conf.%s.rp_filter is %d, by which the kernel drops packets that other "+
					"nodes move here, as the default route leaves over another interface; set it to %d on the node: %w", name,
					strict, loose, errors.Join(err, k.forgetFilters(name)))
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

// noteFilter notes that Landfall is about to change the parameter of an interface. What was noted
// of it before is of no use: somebody else has set it since.
func (k Kernel) noteFilter(name string, was int) error {
	if err := k.forgetFilters(name); err != nil {
		return err
	}
	b := nft.NewBatch(settingsTable)
	b.AddTable()
	b.AddSet(changedSet(was))
	b.AddElements(changedSet(was).Name, nft.Keys(interfaceKey(name)))
	return b.Commit(k.conn)
}

// remember takes the kernel's notes, those of a predecessor too, into noted, and notes again what is
// missing there, as after "nft flush ruleset". Whoever has set a parameter to another value since
// has it.
func (k Kernel) remember(folder string, noted map[string]int) error {
	have, err := readSettings(k.conn)
	if err != nil {
		return err
	}
	var errs []error
	for name, was := range noted {
		if _, there := have[name]; there {
			continue
		}
		now, err := readFilter(folder, name)
		if errors.Is(err, os.ErrNotExist) || err == nil && now != loose {
			delete(noted, name)
			continue
		}
		if err == nil {
			err = k.noteFilter(name, was)
		}
		errs = append(errs, err)
	}
	maps.Copy(noted, have)
	return errors.Join(errs...)
}

func (k Kernel) forgetFilters(names ...string) error { return forgetFilters(k.conn, names) }

// forgetFilters removes the notes about interfaces, and the table if there are no others.
func forgetFilters(conn *nfnetlink.Conn, names []string) error {
	noted, err := readSettings(conn)
	if err != nil {
		return err
	}
	b := nft.NewBatch(settingsTable)
	removed := 0
	for _, name := range names {
		if was, known := noted[name]; known {
			b.RemoveElements(changedSet(was).Name, nft.Keys(interfaceKey(name)))
			removed++
		}
	}
	switch {
	case removed == 0:
		return nil
	case removed == len(noted):
		return nft.Remove(conn, settingsTable.Name)
	}
	return b.Commit(conn)
}

func interfaceKey(name string) string {
	key := make([]byte, unix.IFNAMSIZ)
	copy(key, name)
	return string(key)
}

// readSettings returns the values that interfaces had before Landfall changed them.
func readSettings(conn *nfnetlink.Conn) (was map[string]int, err error) {
	err = nfnetlink.Complete(func() error {
		l := nft.Listing{Conn: conn, Table: settingsTable}
		was = map[string]int{}
		if exists, err := l.Exists(); err != nil || !exists {
			return err
		}
		sets, err := l.Sets()
		if err != nil {
			return err
		}
		for _, value := range []int{0, strict} {
			keys, err := readKeys(l, sets, changedSet(value))
			if err != nil {
				return err
			}
			for _, key := range keys {
				was[string(bytes.TrimRight(key, "\x00"))] = value
			}
		}
		return nil
	})
	return was, err
}

// ResetFilters sets back what Landfall has set of rp_filter, and forgets it. folder is that of the
// network's parameters.
func ResetFilters(folder string) (reset []string, err error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return resetFilters(conn, folder)
}

func (k Kernel) tighten(folder string) (reset []string, err error) {
	return resetFilters(k.conn, folder)
}

func resetFilters(conn *nfnetlink.Conn, folder string) (reset []string, err error) {
	noted, err := readSettings(conn)
	if err != nil {
		return nil, err
	}
	var done []string
	var errs []error
	for name, was := range noted {
		now, err := readFilter(folder, name)
		if err == nil && now == loose { // else others have set it since; their 2 looks like ours
			if err = writeFilter(folder, name, was, func() error { return nil }); err == nil {
				reset = append(reset, name)
			}
		}
		switch {
		case err == nil, errors.Is(err, os.ErrNotExist): // the parameter is gone with the interface
			done = append(done, name)
		default:
			errs = append(errs, err)
		}
	}
	slices.Sort(reset)
	return reset, errors.Join(append(errs, forgetFilters(conn, done))...)
}
