package relay

import (
	"net/netip"
	"sync/atomic"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// namespace is what the Services of a namespace have together, in one protocol. It is safe for concurrent use, but for
// what belongs to the table.
type namespace struct {
	services int // that the table knows; of the table, as tables are
	// all counts the namespaces of which the table knows Services, in the same protocol.
	all   *atomic.Int64
	open  atomic.Int64 // connections
	lines loop.Lines   // of the access log
}

// part names what is relayed of a namespace in one protocol.
type part struct {
	namespace string
	protocol  lb.Protocol
}

// namespaces are those of the Services that a table knows. They belong to the table.
type namespaces struct {
	of  map[part]*namespace
	all map[lb.Protocol]*atomic.Int64
}

func newNamespaces() namespaces {
	return namespaces{map[part]*namespace{}, map[lb.Protocol]*atomic.Int64{lb.TCP: {}, lb.UDP: {}}}
}

// join returns the namespace of one more Service.
func (a namespaces) join(which id) *namespace {
	p := part{which.key.Namespace, which.protocol}
	n := a.of[p]
	if n == nil {
		n = &namespace{all: a.all[which.protocol]}
		a.of[p] = n
		n.all.Add(1)
	}
	n.services++
	return n
}

// leave takes back what join has counted.
func (a namespaces) leave(s *service) {
	if s.namespace.services--; s.namespace.services == 0 {
		delete(a.of, part{s.key.Namespace, s.protocol})
		s.namespace.all.Add(-1)
	}
}

// isAlone reports whether no other namespace has a Service that is relayed.
func (n *namespace) isAlone() bool { return n.all.Load() <= 1 }

// minShare is how many connections a Service may have however small the node's limit is.
const minShare = 32

// shareOf is how many connections a namespace may have of those of the relay, or a Service of those of its namespace:
// four times as many as there are places left at the moment. So one cannot take them all, and one that comes later gets
// places too. A sixteenth of all is each one's own: what more than sixteen need is no fault of a single one, and the
// rules serve it. Of a namespace that is not alone and has its share, no Service gets more.
func shareOf(left, all int64) int64 { return max(4*left, all/16, minShare) }

// admitTo counts a connection to a Service, and reports whether its namespace, the Service and its client may have it;
// table.close takes it back. A namespace that is alone may fill the relay, as nobody else then goes past it.
func (r *Relay) admitTo(s *service, from netip.Addr) bool {
	open, all := s.namespace.open.Add(1), r.high()
	left, hasRoom := all-r.open.Load(), true
	if !s.namespace.isAlone() {
		all = shareOf(left, all)
		left = all - open
		hasRoom = left >= 0
	}
	limit := 0
	if hasRoom {
		limit = min(r.options.ServiceLimit, int(shareOf(left, all)))
	}
	if !s.admit(from, limit, r.options.ClientLimit) {
		s.namespace.open.Add(-1)
		return false
	}
	return true
}
