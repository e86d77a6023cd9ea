package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/landfall-lb/landfall/internal/links"
)

// markPrefix begins the name of the abstract Unix socket that each proxy of Landfall has while it
// runs. Such names belong to a network namespace, so that proxies on one node, which are in pods
// with file systems of their own, see one another's.
const markPrefix = "@landfall-proxy/"

// mark says that a proxy runs on this node.
type mark struct {
	listener net.Listener
	name     string
}

// newMark says so until Close.
func newMark() (mark, error) {
	name := markPrefix + rand.Text()
	listener, err := net.Listen("unix", name)
	if err != nil {
		return mark{}, fmt.Errorf("mark that a proxy runs: %w", err)
	}
	return mark{listener, name}, nil
}

// Close takes the mark away.
func (m mark) Close() error { return m.listener.Close() }

// others returns how many other proxies run on this node. Whoever runs a program there could make up such names: those
// of users that are not root do not count, where the kernel tells them.
func (m mark) others() (int, error) {
	const list = "/proc/thread-self/net/unix"
	text, err := os.ReadFile(list)
	if err != nil {
		return 0, fmt.Errorf("look for other proxies: %w", err)
	}
	names := map[string]bool{}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		if i := strings.Index(lines.Text(), markPrefix); i >= 0 {
			names[lines.Text()[i:]] = true
		}
	}
	if !names[m.name] {
		return 0, fmt.Errorf("look for other proxies: %s does not list this one", list)
	}
	delete(names, m.name)
	owners, err := links.UnixOwners(markPrefix)
	if _, told := owners[m.name]; err != nil || !told { // before Linux 5.3 it names no users
		return len(names), nil //nolint:nilerr // all of them count
	}
	for name := range names {
		if uid, listens := owners[name]; !listens || uid != 0 && uid != uint32(os.Geteuid()) {
			delete(names, name)
		}
	}
	return len(names), nil
}
