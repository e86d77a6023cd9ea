package conntrack

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Connection is a TCP connection that passes the node: who opened it, and where it was sent.
type Connection struct {
	Client netip.Addr
	To     netip.AddrPort
}

const (
	protocolInfo = 4 // CTA_PROTOINFO
	infoTCP      = 1 // CTA_PROTOINFO_TCP
	infoState    = 1 // CTA_PROTOINFO_TCP_STATE

	// The states of a connection that carries data at least one way
	// (linux/netfilter/nf_conntrack_tcp.h): from TCP_CONNTRACK_ESTABLISHED to
	// TCP_CONNTRACK_CLOSE_WAIT.
	firstOpen, lastOpen = 3, 5
)

// Connections calls each for every open TCP connection in the table.
func (n Netlink) Connections(each func(Connection)) error {
	err := n.conn.Dump(request(unix.AF_UNSPEC, getFlow, unix.NLM_F_DUMP, nil), func(m nfnetlink.Message) error {
		if c, ok := decodeConnection(m.Attributes()); ok {
			each(c)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list connections: %w", err)
	}
	return nil
}

// stateTCP reads the state of a TCP connection. The kernel leaves it out for one that is offloaded to a
// flowtable, which is established.
func stateTCP(b []byte) (state uint8, known bool) {
	if state := nfnetlink.Get(b, protocolInfo, infoTCP, infoState); len(state) == 1 {
		return state[0], true
	}
	return establishedTCP, isOffloaded(b)
}

func isOffloaded(b []byte) bool {
	status, _ := nfnetlink.GetNumber(b, attrStatus)
	return status&statusOffloaded != 0
}

// decodeConnection reads an open TCP connection; ok is false for every other flow.
func decodeConnection(b []byte) (c Connection, ok bool) {
	if state, known := stateTCP(b); !known || state < firstOpen || state > lastOpen {
		return Connection{}, false
	}
	protocol, from, to := tuple(nfnetlink.Get(b, tupleOriginal))
	return Connection{Client: from.Addr(), To: to}, protocol == unix.IPPROTO_TCP && from.Addr().IsValid() && to.IsValid()
}
