package conntrack

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Watch hears of connections that are assured or end, as far as the kernel translates their
// destination. It never hears of one that only one end has opened: the kernel drops what it would say
// of a flood of those.
type Watch struct {
	events *nfnetlink.Events
	table  Netlink
}

// OpenWatch opens a watch of the calling thread's network namespace, of all destinations.
func OpenWatch() (*Watch, error) {
	table, err := Open()
	if err != nil {
		return nil, err
	}
	const updated, destroyed = 2, 3 // NFNLGRP_CONNTRACK_UPDATE, NFNLGRP_CONNTRACK_DESTROY
	events, err := nfnetlink.SubscribeTo(eventFilter(nil, nil), updated, destroyed)
	if err != nil {
		table.Close()
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	return &Watch{events, table}, nil
}

// Close closes the sockets. It must not be called before Each has returned.
func (w *Watch) Close() {
	w.events.Close()
	w.table.Close()
}

// Each passes on what happens, and calls lost when something was missed. It returns when ctx ends.
func (w *Watch) Each(ctx context.Context, each func(plan.Tracked), lost func()) error {
	err := w.events.Each(ctx, func(m nfnetlink.Message) {
		if !m.Is(unix.NFNL_SUBSYS_CTNETLINK) {
			return
		}
		if t, ok := decodeTracked(m.Attributes(), m.Kind == deleteFlow); ok {
			each(t)
		}
	}, lost)
	if err != nil {
		return fmt.Errorf("conntrack: %w", err)
	}
	return nil
}

// List passes on all connections that are open.
func (w *Watch) List(each func(plan.Tracked)) error {
	err := w.table.conn.Dump(request(unix.AF_UNSPEC, getFlow, unix.NLM_F_DUMP, nil), func(m nfnetlink.Message) error {
		if t, ok := decodeTracked(m.Attributes(), false); ok && t.Open {
			each(t)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list connections: %w", err)
	}
	return nil
}

// The states in which an end has not said that it sends no more (linux/netfilter/nf_conntrack_tcp.h,
// nf_conntrack_sctp.h).
const (
	establishedTCP  = 3
	establishedSCTP = 4
	heartbeatSCTP   = 8 // HEARTBEAT_SENT: on a second path
)

// decodeTracked reads a connection; ok is false if the message tells nothing of whether it is open.
func decodeTracked(b []byte, gone bool) (t plan.Tracked, ok bool) {
	const wanted = statusAssured | statusTranslated
	if status, _ := nfnetlink.GetNumber(b, attrStatus); status&wanted != wanted {
		return t, false
	}
	protocol, client, to := tuple(nfnetlink.Get(b, tupleOriginal))
	_, backend, _ := tuple(nfnetlink.Get(b, tupleReply))
	t = plan.Tracked{Protocol: protocolsByNumber[protocol], Client: client, To: to, Backend: backend}
	ok = client.IsValid() && to.IsValid() && backend.IsValid()
	if gone {
		return t, ok && t.Protocol != ""
	}
	switch t.Protocol {
	case lb.UDP:
		t.Open = true
	case lb.TCP:
		state, known := stateTCP(b)
		ok, t.Open = ok && known, known && state == establishedTCP
	case lb.SCTP:
		state := nfnetlink.Get(b, protocolInfo, infoSCTP, infoState)
		ok, t.Open = ok && len(state) == 1, len(state) == 1 && (state[0] == establishedSCTP || state[0] == heartbeatSCTP)
	default:
		return t, false
	}
	return t, ok
}
