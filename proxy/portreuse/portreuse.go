// Package portreuse has the kernel use source ports of connections in TIME_WAIT again, and sets back what it has set.
//
// The end that closes a connection first keeps it in TIME_WAIT for 60 s. Where a client of the relay closes first, the
// relay closes first towards the backend, so each such connection would keep one of the node's ports for that backend.
package portreuse

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// Parameter is the kernel parameter below /proc/sys/net. It is for IPv6 too, and takes effect for connections with TCP
// timestamps.
const Parameter = "ipv4/tcp_tw_reuse"

// Values of the parameter.
const (
	off      = 0
	on       = 1
	loopback = 2 // only from the node to itself: the kernel's default
)

// settingsTable remembers the value that was there before, as the name of a set. Like the parameter itself, it is gone
// when the node starts again.
var settingsTable = nft.Table{Family: lb.IPv4, Name: "landfall-settings-tcp"}

func wasSet(value int) nft.Set {
	return nft.Set{Name: fmt.Sprintf("tcp-tw-reuse-was-%d", value), KeyType: nft.TypeIfname, KeyLength: unix.IFNAMSIZ}
}

// Enable sets the parameter, and remembers what it was, unless it is set already. folder is that of the network's
// parameters.
func Enable(folder string) (changed bool, err error) {
	was, err := read(folder)
	if err != nil || was == on {
		return false, err
	}
	f, err := os.OpenFile(filepath.Join(folder, Parameter), os.O_WRONLY, 0)
	if err != nil {
		return false, err
	}
	defer f.Close()
	conn, err := nfnetlink.Open()
	if err != nil {
		return false, err
	}
	defer conn.Close()
	if err := note(conn, was); err != nil {
		return false, fmt.Errorf("remember its value %d: %w", was, err)
	}
	if _, err := f.WriteString(strconv.Itoa(on) + "\n"); err != nil {
		return false, errors.Join(err, forget(conn))
	}
	return true, nil
}

// Keep returns what is noted to set back, nil for nothing. If the note is gone, as after `nft flush ruleset`, and the
// parameter is set still, it is written again from was, which an earlier call returned.
func Keep(folder string, was *int) (*int, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return was, err
	}
	defer conn.Close()
	value, found, err := noted(conn)
	switch {
	case err != nil:
		return was, err
	case found:
		return &value, nil
	case was == nil:
		return nil, nil
	}
	now, err := read(folder)
	if err != nil || now != on {
		return nil, err // somebody else's value
	}
	return was, note(conn, *was)
}

// Restore sets the parameter back if Enable has set it, and forgets that. A value that somebody else has set since
// stays.
func Restore(folder string) (changed bool, err error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return false, err
	}
	defer conn.Close()
	was, noted, err := noted(conn)
	if err != nil || !noted {
		return false, err
	}
	now, err := read(folder)
	if err == nil && now == on { // somebody else's 1 looks like ours
		err = os.WriteFile(filepath.Join(folder, Parameter), []byte(strconv.Itoa(was)+"\n"), 0o644)
		changed = err == nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, err
	}
	return changed, forget(conn)
}

func read(folder string) (int, error) {
	text, err := os.ReadFile(filepath.Join(folder, Parameter))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// note remembers a value in place of one that was noted before: somebody else has set the parameter since.
func note(conn *nfnetlink.Conn, was int) error {
	if err := forget(conn); err != nil {
		return err
	}
	b := nft.NewBatch(settingsTable)
	b.AddTable()
	b.AddSet(wasSet(was))
	return b.Commit(conn)
}

func forget(conn *nfnetlink.Conn) error { return nft.Remove(conn, settingsTable.Name) }

// noted returns the value that the parameter had before Enable set it.
func noted(conn *nfnetlink.Conn) (was int, ok bool, err error) {
	err = nfnetlink.Complete(func() error {
		was, ok = 0, false
		l := nft.Listing{Conn: conn, Table: settingsTable}
		if exists, err := l.Exists(); err != nil || !exists {
			return err
		}
		sets, err := l.Sets()
		if err != nil {
			return err
		}
		for _, value := range []int{off, loopback} {
			if _, there := sets[wasSet(value).Name]; there {
				was, ok = value, true
			}
		}
		return nil
	})
	return was, ok, err
}
