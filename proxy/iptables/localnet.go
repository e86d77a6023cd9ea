package iptables

import (
	"bufio"
	"context"
	"io"
	"strings"
)

// chainLocalnet is an empty chain in the table filter. It is there while Landfall has set the
// kernel parameter route_localnet, so that whoever removes the rules knows to set it back. It lives
// as long as the parameter itself: until the node starts again.
const chainLocalnet = prefix + "SET-ROUTE-LOCALNET"

// Localnet is the memory of who has set the kernel parameter route_localnet.
type Localnet struct{ Kernel Kernel }

// Set reports whether Landfall has set the parameter, and whether kube-proxy in iptables mode
// serves this node too and so needs it.
func (l Localnet) Set(ctx context.Context) (set, needed bool, err error) {
	err = l.Kernel.Save(ctx, func(saved io.Reader) error {
		scanner := bufio.NewScanner(saved)
		scanner.Buffer(nil, maxLine)
		for scanner.Scan() {
			line := scanner.Text()
			set = set || strings.HasPrefix(line, ":"+chainLocalnet+" ")
			needed = needed || isKubeProxys(line)
		}
		return scanner.Err()
	})
	return set, needed, err
}

// isKubeProxys reports whether a line of iptables-save is kube-proxy's jump to its Services.
func isKubeProxys(line string) bool {
	return strings.HasPrefix(line, "-A PREROUTING ") && target(line) == "KUBE-SERVICES"
}

// Mark notes that Landfall is about to set the parameter. The actor keeps the note.
func (l Localnet) Mark(ctx context.Context) error {
	return l.Kernel.Restore(ctx, "*filter\n:"+chainLocalnet+" - [0:0]\nCOMMIT\n")
}

// setLocalnet is Set for rules that have been read already.
func (t tables) setLocalnet() (set, needed bool) {
	_, set = t.filter[chainLocalnet]
	for _, r := range t.nat["PREROUTING"] {
		needed = needed || target(r) == "KUBE-SERVICES"
	}
	return set, needed
}
