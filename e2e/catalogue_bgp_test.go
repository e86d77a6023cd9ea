package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// Types of BGP messages (RFC 4271 section 4.1, RFC 2918).
const (
	bgpOpen = iota + 1
	bgpUpdate
	bgpNotification
	bgpKeepalive
	bgpRefresh
)

// bgpMessage returns a message with a right header.
func bgpMessage(kind byte, body []byte) []byte {
	return bgpHeader(uint16(19+len(body)), kind, body)
}

func bgpHeader(length uint16, kind byte, body []byte) []byte {
	b := bytes.Repeat([]byte{0xff}, 16)
	return append(append(binary.BigEndian.AppendUint16(b, length), kind), body...)
}

// hostilePeer is the hostile peer over one family.
type hostilePeer struct {
	six  bool
	name string // of the BGPPeer
	at   netip.AddrPort
	addr netip.Addr // its own
}

// hostilePeers are both, which speak with the besieged node.
func hostilePeers() []hostilePeer {
	own, node := netip.MustParseAddr("172.26.236.20"), netip.MustParseAddr("172.26.236.177")
	return []hostilePeer{
		{false, "fuzzer", netip.AddrPortFrom(node, 179), own},
		{true, "fuzzer-v6", netip.AddrPortFrom(lab.Twin(node), 179), lab.Twin(own)},
	}
}

// family is the number of the address family (IANA) of the routes that the session has, other that of the other one.
func (p hostilePeer) family() byte {
	if p.six {
		return 2
	}
	return 1
}

func (p hostilePeer) other() byte { return 3 - p.family() }

// announce is an UPDATE with attributes and a route of the session's family: what is given of IPv4, or of IPv6.
func (p hostilePeer) announce(attributes, route, route6 []byte) []byte {
	if !p.six {
		return bgpUpdateOf(nil, attributes, route)
	}
	reach := slices.Concat([]byte{0, 2, 1, 16}, p.addr.AsSlice(), []byte{0}, route6) // RFC 4760 section 3
	return bgpUpdateOf(nil, attributesOf(attributes, []byte{0x80, 14, byte(len(reach))}, reach), nil)
}

// open returns the OPEN of the hostile peer, changed.
func (p hostilePeer) open(change func(version, as, hold *int, id *[4]byte, params *[]byte)) []byte {
	version, as, hold, id := 4, 64666, 90, [4]byte{172, 26, 236, 20}
	params := []byte{2, 6, 1, 4, 0, p.family(), 0, 1} // multiprotocol: unicast
	if change != nil {
		change(&version, &as, &hold, &id, &params)
	}
	b := []byte{byte(version), byte(as >> 8), byte(as), byte(hold >> 8), byte(hold)}
	b = append(append(b, id[:]...), byte(len(params)))
	return bgpMessage(bgpOpen, append(b, params...))
}

func (p hostilePeer) openParams(params ...byte) []byte {
	return p.open(func(_, _, _ *int, _ *[4]byte, p *[]byte) { *p = params })
}

// bgpUpdateOf returns an UPDATE.
func bgpUpdateOf(withdrawn, attributes, routes []byte) []byte {
	b := append(binary.BigEndian.AppendUint16(nil, uint16(len(withdrawn))), withdrawn...)
	b = append(binary.BigEndian.AppendUint16(b, uint16(len(attributes))), attributes...)
	return bgpMessage(bgpUpdate, append(b, routes...))
}

var (
	originIGP   = []byte{0x40, 1, 1, 0}
	asPath      = []byte{0x40, 2, 4, 2, 1, 0xfc, 0x9a} // 64666, in two octets
	nextHopOf   = []byte{0x40, 3, 4, 172, 26, 236, 20}
	hostileNLRI = []byte{24, 203, 0, 113}

	hostileNLRI6 = []byte{64, 0xfd, 0, 2, 3, 0, 0, 1, 0x13} // fd00:203:0:113::/64
)

// attributesOf joins path attributes.
func attributesOf(all ...[]byte) []byte { return bytes.Join(all, nil) }

// The stages at which a row speaks.
const (
	atOpenSent = iota
	atOpenConfirm
	atEstablished
)

// bgpRow is what the hostile peer sends, and the NOTIFICATION that it gets.
type bgpRow struct {
	name  string
	stage int
	send  []byte
	// code and subcode are those of the NOTIFICATION; with 0 the session goes on.
	code, subcode byte
	// closed has the peer get the end of the connection without a word.
	closed bool
}

// goesOn reports whether the session goes on after the row.
func (r bgpRow) goesOn() bool { return r.code == 0 && !r.closed }

// shown returns how many prefixes the speaker shows of what the row sends: as the peer has acceptRoutes, those with
// which nothing is wrong.
func (r bgpRow) shown() float64 {
	switch r.name {
	case "a path with the node's own AS", "an unknown optional attribute of 2000 bytes", "a route to everything",
		"a route to the VIP of another Service":
		return 1
	}
	return 0
}

func (p hostilePeer) rows() []bgpRow {
	good := p.open(nil)
	marker := bytes.Clone(good)
	marker[7] = 0
	keepalive := bgpMessage(bgpKeepalive, nil)
	update := func(attributes []byte, routes []byte) []byte {
		if bytes.Equal(routes, hostileNLRI) {
			return p.announce(attributes, hostileNLRI, hostileNLRI6)
		}
		return bgpUpdateOf(nil, attributes, routes)
	}
	full := attributesOf(originIGP, asPath, nextHopOf)
	rows := []bgpRow{
		{"a marker with a hole", atOpenSent, marker, 1, 1, false},
		{"HTTP", atOpenSent, []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), 1, 1, false},
		{"a TLS greeting", atOpenSent, append([]byte{22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3}, make([]byte, 40)...), 1, 1, false},
		{"zeros", atOpenSent, make([]byte, 19), 1, 1, false},
		{"a message of 18 bytes", atOpenSent, bgpHeader(18, bgpKeepalive, nil), 1, 2, false},
		{"a message of 0 bytes", atOpenSent, bgpHeader(0, bgpOpen, nil), 1, 2, false},
		{"a message of 4097 bytes", atOpenSent, bgpHeader(4097, bgpOpen, nil), 1, 2, false},
		{"a message of 65535 bytes", atOpenSent, bgpHeader(65535, bgpUpdate, nil), 1, 2, false},
		{"an OPEN of 28 bytes", atOpenSent, bgpHeader(28, bgpOpen, make([]byte, 9)), 1, 2, false},
		{"a KEEPALIVE of 20 bytes", atOpenSent, bgpHeader(20, bgpKeepalive, []byte{0}), 1, 2, false},
		{"a NOTIFICATION of 20 bytes", atOpenSent, bgpHeader(20, bgpNotification, []byte{6}), 1, 2, false},
		{"message type 0", atOpenSent, bgpMessage(0, make([]byte, 10)), 1, 3, false},
		{"message type 6", atOpenSent, bgpMessage(6, nil), 1, 3, false},
		{"message type 255", atOpenSent, bgpMessage(255, make([]byte, 100)), 1, 3, false},
		{"version 3", atOpenSent, p.open(func(v, _, _ *int, _ *[4]byte, _ *[]byte) { *v = 3 }), 2, 1, false},
		{"version 255", atOpenSent, p.open(func(v, _, _ *int, _ *[4]byte, _ *[]byte) { *v = 255 }), 2, 1, false},
		{"another AS", atOpenSent, p.open(func(_, as, _ *int, _ *[4]byte, _ *[]byte) { *as = 64667 }), 2, 2, false},
		{"AS 0", atOpenSent, p.open(func(_, as, _ *int, _ *[4]byte, _ *[]byte) { *as = 0 }), 2, 2, false},
		{"the node's own AS", atOpenSent, p.open(func(_, as, _ *int, _ *[4]byte, _ *[]byte) { *as = 64500 }), 2, 2, false},
		{"another AS in four octets", atOpenSent, p.openParams(2, 6, 65, 4, 0, 1, 0, 0), 2, 2, false},
		{"identifier 0.0.0.0", atOpenSent, p.open(func(_, _, _ *int, id *[4]byte, _ *[]byte) { *id = [4]byte{} }), 2, 3,
			false},
		{"a hold time of 1 s", atOpenSent, p.open(func(_, _, hold *int, _ *[4]byte, _ *[]byte) { *hold = 1 }), 2, 6,
			false},
		{"a hold time of 2 s", atOpenSent, p.open(func(_, _, hold *int, _ *[4]byte, _ *[]byte) { *hold = 2 }), 2, 6,
			false},
		{"an unknown parameter", atOpenSent, p.openParams(7, 2, 0, 0), 2, 4, false},
		{"an authentication parameter", atOpenSent, p.openParams(1, 1, 0), 2, 4, false},
		{"a parameter that is longer than the message", atOpenSent, p.openParams(2, 200, 1, 4), 2, 0, false},
		{"a capability that is longer than its parameter", atOpenSent, p.openParams(2, 4, 1, 99, 0, 1), 2, 0, false},
		{"a parameter of one byte", atOpenSent, p.openParams(2), 2, 0, false},
		{"a multiprotocol capability of two bytes", atOpenSent, p.openParams(2, 4, 1, 2, 0, 1), 2, 0, false},
		{"only the other family", atOpenSent, p.openParams(2, 6, 1, 4, 0, p.other(), 0, 1), 2, 7, false},
		{"only VPN routes", atOpenSent, p.openParams(2, 6, 1, 4, 0, 1, 0, 128), 2, 7, false},
		{"parameters that the length does not tell of", atOpenSent, func() []byte {
			b := p.open(nil)
			b[28] = 200
			return b
		}(), 2, 0, false},
		{"a KEEPALIVE first", atOpenSent, keepalive, 5, 1, false},
		{"an UPDATE first", atOpenSent, bgpUpdateOf(nil, nil, nil), 5, 1, false},
		{"a ROUTE-REFRESH first", atOpenSent, bgpMessage(bgpRefresh, []byte{0, 1, 0, 1}), 5, 1, false},
		{"a NOTIFICATION first", atOpenSent, bgpMessage(bgpNotification, []byte{6, 2, 200, 'x'}), 0, 0, true},
		{"a second OPEN", atOpenConfirm, good, 5, 2, false},
		{"an UPDATE before the KEEPALIVE", atOpenConfirm, bgpUpdateOf(nil, nil, nil), 5, 2, false},
		{"an OPEN in the session", atEstablished, good, 5, 3, false},
		{"a NOTIFICATION with a code that is none", atEstablished, bgpMessage(bgpNotification, []byte{99, 99}), 0, 0, true},
		{"a NOTIFICATION of 4096 bytes", atEstablished, bgpMessage(bgpNotification,
			append([]byte{6, 2, 255}, bytes.Repeat([]byte{0x1b}, 4074)...)), 0, 0, true},
		{"a ROUTE-REFRESH of 5 bytes", atEstablished, bgpMessage(bgpRefresh, make([]byte, 5)), 7, 1, false},
		{"a ROUTE-REFRESH for a family that is none", atEstablished, bgpMessage(bgpRefresh, []byte{99, 99, 0, 99}), 0, 0,
			false},
		{"100 wishes for routes", atEstablished, bytes.Repeat(bgpMessage(bgpRefresh, []byte{0, 1, 0, 1}), 100), 0, 0, false},
		{"10,000 KEEPALIVEs", atEstablished, bytes.Repeat(keepalive, 10000), 0, 0, false},
		{"withdrawn routes that are longer than the message", atEstablished,
			bgpMessage(bgpUpdate, []byte{0xff, 0xff, 0, 0}), 3, 1, false},
		{"attributes that are longer than the message", atEstablished,
			bgpMessage(bgpUpdate, []byte{0, 0, 0xff, 0xff}), 3, 1, false},
		{"a withdrawn route of 33 bits", atEstablished, bgpUpdateOf([]byte{33, 1, 2, 3, 4, 5}, nil, nil), 3, 10, false},
		{"a route of 255 bits", atEstablished, update(full, []byte{255}), 3, 10, false},
		{"a route that ends early", atEstablished, update(full, []byte{24, 203}), 3, 10, false},
		{"an attribute of one byte", atEstablished, update([]byte{0x40}, nil), 0, 0, false},
		{"a path without ORIGIN", atEstablished, update(attributesOf(asPath, nextHopOf), hostileNLRI), 0, 0, false},
		{"ORIGIN 3", atEstablished, update(attributesOf([]byte{0x40, 1, 1, 3}, asPath, nextHopOf), hostileNLRI), 0, 0, false},
		{"ORIGIN of two bytes", atEstablished,
			update(attributesOf([]byte{0x40, 1, 2, 0, 0}, asPath, nextHopOf), hostileNLRI), 0, 0, false},
		{"a next hop of three bytes", atEstablished,
			update(attributesOf(originIGP, asPath, []byte{0x40, 3, 3, 1, 2, 3}), hostileNLRI), 0, 0, false},
		{"next hop 0.0.0.0", atEstablished,
			update(attributesOf(originIGP, asPath, []byte{0x40, 3, 4, 0, 0, 0, 0}), hostileNLRI), 0, 0, false},
		{"a path of an unknown kind", atEstablished,
			update(attributesOf(originIGP, []byte{0x40, 2, 4, 9, 1, 0xfc, 0x9a}, nextHopOf), hostileNLRI), 0, 0, false},
		{"a path with the node's own AS", atEstablished,
			update(attributesOf(originIGP, []byte{0x40, 2, 4, 2, 1, 0xfb, 0xf4}, nextHopOf), hostileNLRI), 0, 0, false},
		{"an unknown well-known attribute", atEstablished,
			update(attributesOf(full, []byte{0x40, 99, 1, 0}), hostileNLRI), 3, 2, false},
		{"an unknown optional attribute of 2000 bytes", atEstablished,
			update(attributesOf(full, append([]byte{0xd0, 99, 0x07, 0xd0}, make([]byte, 2000)...)), hostileNLRI), 0, 0, false},
		{"a route to everything", atEstablished, p.announce(full, []byte{0}, []byte{0}), 0, 0, false},
		{"a route to the VIP of another Service", atEstablished, p.announce(full,
			[]byte{32, 172, 26, 236, 180}, append([]byte{128}, seedVIP6.Addr().AsSlice()...)), 0, 0, false},
		{"a message that ends early", atEstablished, bgpHeader(100, bgpUpdate, []byte{0, 0}), 0, 0, true},
	}
	return rows
}

// hostileBGP has a configured peer send what no router would, over connections that it opens, and
// checks that it is told so as RFC 4271 wants it.
func hostileBGP(t *testing.T, l *lab.Lab) {
	for _, peer := range hostilePeers() {
		t.Run(peer.at.Addr().String(), func(t *testing.T) { peer.hostile(t, l) })
	}
}

func (p hostilePeer) hostile(t *testing.T, l *lab.Lab) {
	for _, row := range p.rows() {
		t.Run(row.name, func(t *testing.T) {
			conn := p.connect(t, l, row.stage)
			defer conn.Close()
			send := func() error {
				_, err := conn.Write(row.send)
				return err
			}
			if row.goesOn() && row.send[18] == bgpUpdate {
				row.send = append(row.send, bgpUpdateOf(nil, nil, nil)...) // once this counts, the row was taken in
				wantGrown(t, l.Agent("speaker", besieged),
					fmt.Sprintf("landfall_bgp_updates_total{direction=\"in\",peer=%q}", p.name), 2, send)
				p.wantNoRoute(t, l, row.shown())
			} else if err := send(); err != nil {
				t.Fatal(err)
			}
			if row.name == "a message that ends early" {
				conn.Close()
				p.connect(t, l, atEstablished).Close() // the next one is taken
				return
			}
			want := fmt.Sprintf("NOTIFICATION %d/%d", row.code, row.subcode)
			if row.goesOn() {
				// What follows it is answered, so that it was not the end.
				if _, err := conn.Write(bgpMessage(77, nil)); err != nil {
					t.Fatal(err)
				}
				want = "NOTIFICATION 1/3"
			}
			if row.closed {
				want = "closed"
			}
			if got := bgpEnd(conn); got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
	t.Run("a stranger", func(t *testing.T) {
		a := l.Agent("speaker", besieged)
		wantCounted(t, a, "landfall_bgp_connections_refused_total", 20, func() error {
			conn, err := l.Dial(t.Context(), "my-nginx-1", "tcp", p.at.String())
			if err != nil {
				return err
			}
			defer conn.Close()
			if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
				return err
			}
			if got := bgpEnd(conn); got != "closed" {
				return errors.New(got)
			}
			return nil
		})
	})
	t.Run("500 connections at a time", func(t *testing.T) {
		for range 500 {
			conn, err := l.Dial(t.Context(), hostileHost, "tcp", p.at.String())
			if err == nil {
				defer conn.Close()
			}
		}
		p.connect(t, l, atEstablished).Close() // the session can be had all the same
	})
}

// wantNoRoute checks that the besieged node, whose session with the hostile peer is up, has taken no route of it.
func (p hostilePeer) wantNoRoute(t *testing.T, l *lab.Lab, shown float64) {
	t.Helper()
	for _, family := range []string{"-4", "-6"} {
		for route := range strings.Lines(mustExec(t, l, besieged, "ip", family, "route", "show", "table", "all")) {
			if strings.Contains(route, "via "+p.addr.String()+" ") || strings.Contains(route, " proto bgp ") {
				t.Errorf("the node has taken a route: %s", route)
			}
		}
	}
	kept := fmt.Sprintf("landfall_bgp_prefixes_received{peer=%q}", p.name)
	if n := counter(t, l.Agent("speaker", besieged), kept); n != shown {
		t.Errorf("the speaker shows %.0f prefixes, want %.0f", n, shown)
	}
}

// connect opens a connection to the besieged node and takes it to a stage. The node may still be
// busy with the end of the one before.
func (p hostilePeer) connect(t *testing.T, l *lab.Lab, stage int) (conn net.Conn) {
	t.Helper()
	eventually(t, "a BGP connection", func() error {
		c, err := l.Dial(t.Context(), hostileHost, "tcp", p.at.String())
		if err == nil {
			err = c.SetDeadline(time.Now().Add(patience))
		}
		if err == nil {
			err = p.reach(c, stage)
		}
		if err != nil && c != nil {
			c.Close()
		}
		conn = c
		return err
	})
	return conn
}

// keep opens a session and keeps it, however long it takes, until it is closed.
func (p hostilePeer) keep(t *testing.T, l *lab.Lab) net.Conn {
	t.Helper()
	conn := p.connect(t, l, atEstablished)
	if err := conn.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	go func() { // answers the speaker's KEEPALIVEs
		for {
			switch _, err := bgpRead(conn, bgpKeepalive); {
			case err == nil:
				_, _ = conn.Write(bgpMessage(bgpKeepalive, nil))
			case !strings.HasPrefix(err.Error(), "a message of type"):
				return
			}
		}
	}()
	return conn
}

func (p hostilePeer) reach(c net.Conn, stage int) error {
	if _, err := bgpRead(c, bgpOpen); err != nil || stage == atOpenSent {
		return err
	}
	if _, err := c.Write(p.open(nil)); err != nil {
		return err
	}
	if _, err := bgpRead(c, bgpKeepalive); err != nil || stage == atOpenConfirm {
		return err
	}
	_, err := c.Write(bgpMessage(bgpKeepalive, nil))
	return err
}

// bgpRead returns the body of the next message, which is to be of that kind.
func bgpRead(c net.Conn, kind byte) ([]byte, error) {
	header := make([]byte, 19)
	if _, err := io.ReadFull(c, header); err != nil {
		return nil, err
	}
	body := make([]byte, max(0, int(binary.BigEndian.Uint16(header[16:]))-19))
	if _, err := io.ReadFull(c, body); err != nil {
		return nil, err
	}
	if header[18] != kind {
		return body, fmt.Errorf("a message of type %d: %x", header[18], body)
	}
	return body, nil
}

// bgpEnd says how the node ends a connection.
func bgpEnd(c net.Conn) string {
	for {
		body, err := bgpRead(c, bgpNotification)
		switch {
		case err == nil:
			return fmt.Sprintf("NOTIFICATION %d/%d", body[0], body[1])
		case strings.HasPrefix(err.Error(), "a message of type"):
			continue
		case errors.Is(err, io.EOF), strings.Contains(err.Error(), "reset by peer"):
			return "closed"
		default:
			return err.Error()
		}
	}
}
