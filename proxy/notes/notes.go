// Package notes changes kernel parameters, and sets them back. What each one was before, it notes
// in a table of nftables: like the parameters themselves, notes outlive the program, and are gone
// when the node starts again.
//
// Others may flush the table. So the program remembers too what the notes say, and Keep writes them
// again.
//
// The note of route_localnet is not one of these: the dialect of iptables keeps it with its rules,
// as it has to do without nftables.
package notes

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// Parameter is a kernel parameter that Landfall sets to one value.
type Parameter struct {
	// Path is the parameter's below /proc/sys/net. A * stands for the name of an interface; without
	// one, the parameter is the node's, and its interface is "".
	Path string
	// Value is what Landfall sets it to.
	Value int
	// Table has the notes, and nothing else: it goes with the last one. Prefix and a value are the
	// name of the set of those that were noted with that value.
	Table, Prefix string
}

func (p Parameter) table() nft.Table { return nft.Table{Family: lb.IPv4, Name: p.Table} }

// set has the interfaces on which the parameter had a value. For a parameter of the node it is
// empty, and says so by being there.
func (p Parameter) set(was int) nft.Set {
	return nft.Set{Name: fmt.Sprint(p.Prefix, was), KeyType: nft.TypeIfname, KeyLength: unix.IFNAMSIZ}
}

func (p Parameter) perInterface() bool { return strings.Contains(p.Path, "*") }

func (p Parameter) file(folder, iface string) string {
	return filepath.Join(folder, strings.Replace(p.Path, "*", iface, 1))
}

// Read returns the parameter's value. folder is that of the network's parameters, as in all
// methods.
func (p Parameter) Read(folder, iface string) (int, error) {
	text, err := os.ReadFile(p.file(folder, iface))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// Set sets the parameter, and notes first what it was. Where it cannot be set, nothing is noted.
func (p Parameter) Set(conn *nfnetlink.Conn, folder, iface string, was int) error {
	f, err := p.open(folder, iface)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := p.note(conn, iface, was); err != nil {
		return fmt.Errorf("note its value %d: %w", was, err)
	}
	if err := write(f, p.Value); err != nil {
		return errors.Join(err, p.forget(conn, iface))
	}
	return nil
}

func (p Parameter) open(folder, iface string) (*os.File, error) {
	return os.OpenFile(p.file(folder, iface), os.O_WRONLY, 0)
}

func write(f *os.File, value int) error {
	_, err := f.WriteString(strconv.Itoa(value) + "\n")
	return err
}

// Keep takes the kernel's notes, those of a predecessor too, into noted, by interface, and notes
// again what is missing there, as after "nft flush ruleset". Whoever has set a parameter to another
// value since has it. A note of an interface that is gone goes too: one that gets its name later has
// a parameter of its own.
func (p Parameter) Keep(conn *nfnetlink.Conn, folder string, noted map[string]int) error {
	have, err := p.read(conn)
	if err != nil {
		return err
	}
	errs := []error{p.forgetGone(conn, folder, have)}
	for iface, was := range noted {
		if _, there := have[iface]; there {
			continue
		}
		now, err := p.Read(folder, iface)
		if errors.Is(err, os.ErrNotExist) || err == nil && now != p.Value {
			delete(noted, iface)
			continue
		}
		if err == nil {
			err = p.note(conn, iface, was)
		}
		errs = append(errs, err)
	}
	maps.Copy(noted, have)
	return errors.Join(errs...)
}

// forgetGone forgets notes of parameters that are gone with their interfaces, in the kernel and in
// have.
func (p Parameter) forgetGone(conn *nfnetlink.Conn, folder string, have map[string]int) error {
	before, _, perInterface := strings.Cut(p.Path, "*")
	if _, err := os.Stat(filepath.Join(folder, before)); !perInterface || err != nil {
		return nil // unknown is not absent
	}
	var gone []string
	for iface := range have {
		if _, err := p.Read(folder, iface); errors.Is(err, os.ErrNotExist) {
			gone = append(gone, iface)
			delete(have, iface)
		}
	}
	if len(gone) == 0 {
		return nil
	}
	return p.forget(conn, gone...)
}

// Restore sets back what is noted, in the kernel or in noted, and forgets that. Where others have
// set another value since, it stays. It returns the interfaces whose parameter it has changed. What
// it could not set back stays noted.
func (p Parameter) Restore(conn *nfnetlink.Conn, folder string, noted map[string]int) (reset []string, err error) {
	have, err := p.read(conn)
	if err != nil {
		return nil, err // unknown is not absent
	}
	all := maps.Clone(have)
	for iface, was := range noted {
		if _, there := all[iface]; !there {
			all[iface] = was
		}
	}
	var done []string
	var errs []error
	for iface, was := range all {
		changed, err := p.setBack(folder, iface, was)
		if changed {
			reset = append(reset, iface)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) { // else it is gone with its interface
			errs = append(errs, err)
			continue
		}
		done = append(done, iface)
		delete(noted, iface) // or the value that others set next would be taken for ours
	}
	slices.Sort(reset)
	return reset, errors.Join(append(errs, p.forget(conn, done...))...)
}

// setBack sets the parameter back unless it has another value than Landfall's. One that others have
// set to that looks like Landfall's.
func (p Parameter) setBack(folder, iface string, was int) (changed bool, err error) {
	if now, err := p.Read(folder, iface); err != nil || now != p.Value {
		return false, err
	}
	f, err := p.open(folder, iface)
	if err != nil {
		return false, err
	}
	defer f.Close()
	err = write(f, was)
	return err == nil, err
}

// note notes a value. What was noted before is of no use: somebody else has set the parameter
// since.
func (p Parameter) note(conn *nfnetlink.Conn, iface string, was int) error {
	if err := p.forget(conn, iface); err != nil {
		return err
	}
	b := nft.NewBatch(p.table())
	b.AddTable()
	b.AddSet(p.set(was))
	if p.perInterface() {
		b.AddElements(p.set(was).Name, nft.Keys(key(iface)))
	}
	return b.Commit(conn)
}

// forget removes notes, and the table with the last one.
func (p Parameter) forget(conn *nfnetlink.Conn, ifaces ...string) error {
	noted, err := p.read(conn)
	if err != nil {
		return err
	}
	b := nft.NewBatch(p.table())
	removed := 0
	for _, iface := range ifaces {
		if was, known := noted[iface]; known {
			b.RemoveElements(p.set(was).Name, nft.Keys(key(iface)))
			removed++
		}
	}
	switch {
	case removed == 0:
		return nil
	case removed == len(noted):
		return nft.Remove(conn, p.Table)
	}
	return b.Commit(conn)
}

func key(iface string) string {
	key := make([]byte, unix.IFNAMSIZ)
	copy(key, iface)
	return string(key)
}

// read returns the notes.
func (p Parameter) read(conn *nfnetlink.Conn) (was map[string]int, err error) {
	err = nfnetlink.Complete(func() error {
		was = map[string]int{}
		l := nft.Listing{Conn: conn, Table: p.table()}
		exists, err := l.Exists()
		if unavailable(err) {
			return nil // nothing was ever noted
		}
		if err != nil || !exists {
			return err
		}
		sets, err := l.Sets()
		if err != nil {
			return err
		}
		for name, shape := range sets {
			value, err := strconv.Atoi(strings.TrimPrefix(name, p.Prefix))
			if set := p.set(value); err != nil || name != set.Name || shape != set.Shape() {
				continue
			}
			if !p.perInterface() {
				was[""] = value
				continue
			}
			if err := l.Elements(name, func(e nft.Element) {
				was[string(bytes.TrimRight(e.Key, "\x00"))] = value
			}); err != nil {
				return err
			}
		}
		return nil
	})
	return was, err
}

// unavailable reports whether an error of listing tables says that the kernel has no nftables: it
// calls a subsystem invalid that it does not have.
func unavailable(err error) bool { return errors.Is(err, unix.EINVAL) }
