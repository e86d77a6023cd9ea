package rescue

import (
	"bytes"
	"errors"
	"fmt"
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
// that it had. Like the parameter itself, it is there until the node starts again.
var settingsTable = nft.Table{Family: lb.IPv4, Name: "landfall-settings"}

func changedSet(was int) nft.Set {
	return nft.Set{Name: fmt.Sprintf("rp-filter-was-%d", was), KeyType: nft.TypeIfname, KeyLength: unix.IFNAMSIZ}
}

// checkFilters makes the kernel take the packets that other nodes on a ring move here: where
// routers are reached over other interfaces than the nodes, a strict rp_filter drops them.
func (a *Actor) checkFilters(want *table, neighbors map[netip.Addr]links.Neighbor) {
	if a.parameters == "" || len(want.ring) == 0 {
		return
	}
	var from []int
	for _, n := range neighbors {
		if n.Found && n.Link != 0 && !slices.Contains(from, n.Link) {
			from = append(from, n.Link)
		}
	}
	slices.Sort(from)
	set, err := a.kernel.loosen(a.parameters, from)
	for _, name := range set {
		a.log.Info("set a kernel parameter, as other nodes move packets here that a strict filter drops", "parameter",
			"net.ipv4.conf."+name+".rp_filter", "value", loose)
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != a.filtered {
		a.log.Warn("connections are lost that other nodes move here", "error", err)
		a.warn(text)
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

func writeFilter(folder, iface string, value int) error {
	return os.WriteFile(filterOf(folder, iface), []byte(strconv.Itoa(value)+"\n"), 0o644)
}

// loosen has interfaces take packets whose answers leave over another one, unless that is the
// default route's: those need nothing. folder is that of the network's parameters. It returns the
// interfaces that it has changed.
func (k Kernel) loosen(folder string, from []int) (changed []string, err error) {
	out := k.near.Uplink()
	all, err := readFilter(folder, "all")
	if err != nil || out == 0 || all == loose {
		return nil, err
	}
	var errs []error
	for _, link := range from {
		name, err := k.near.Name(link)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		was, err := readFilter(folder, name)
		if err != nil || link == out || max(all, was) != strict {
			errs = append(errs, err)
			continue
		}
		err = k.noteFilter(name, was)
		if err == nil {
			err = writeFilter(folder, name, loose)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("net.ipv4.conf.%s.rp_filter is %d, by which the kernel drops packets that other "+
				"nodes move here, as the default route leaves over another interface; set it to %d on the node: %w", name,
				strict, loose, err))
			continue
		}
		changed = append(changed, name)
	}
	return changed, errors.Join(errs...)
}

// noteFilter notes that Landfall is about to change the parameter of an interface.
func (k Kernel) noteFilter(name string, was int) error {
	noted, err := readSettings(k.conn)
	if err != nil {
		return err
	}
	if _, known := noted[name]; known {
		return nil
	}
	key := make([]byte, unix.IFNAMSIZ)
	copy(key, name)
	b := nft.NewBatch(settingsTable)
	b.AddTable()
	b.AddSet(changedSet(was))
	b.AddElements(changedSet(was).Name, each([]string{string(key)}))
	return b.Commit(k.conn)
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
	noted, err := readSettings(conn)
	if err != nil || len(noted) == 0 {
		return nil, err
	}
	var errs []error
	for name, was := range noted {
		now, err := readFilter(folder, name)
		switch {
		case errors.Is(err, os.ErrNotExist): // the interface is gone, and with it the parameter
		case err == nil && now == loose:
			if err = writeFilter(folder, name, was); err == nil {
				reset = append(reset, name)
			}
			errs = append(errs, err)
		default: // others have set it since
			errs = append(errs, err)
		}
	}
	slices.Sort(reset)
	if err := errors.Join(errs...); err != nil {
		return reset, err
	}
	return reset, nft.Remove(conn, settingsTable.Name)
}
