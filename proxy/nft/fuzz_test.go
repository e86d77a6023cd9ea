package nft

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// match encodes one of iptables' matches, as the kernel lists it.
func match(name string, revision uint32, info []byte) []byte {
	var a nfnetlink.Attributes
	a.Nested(unix.NFTA_LIST_ELEM, func() {
		a.Text(unix.NFTA_EXPR_NAME, "match")
		a.Nested(unix.NFTA_EXPR_DATA, func() {
			a.Text(unix.NFTA_MATCH_NAME, name)
			a.Number(unix.NFTA_MATCH_REV, revision)
			a.Bytes(unix.NFTA_MATCH_INFO, info)
		})
	})
	return a
}

// toPort are the expressions of a rule that accepts TCP to a port.
func toPort(port uint16) []byte {
	return expr.Encode(expr.Join(expr.IsProtocol(expr.CmpOpEq, unix.IPPROTO_TCP),
		expr.List{expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, portOffset, 2),
			expr.Compare(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, port)...)}, expr.Accept()))
}

// FuzzReadRule checks that whatever expressions another program's rule has, also of kinds and sizes that are not known
// here, a rule that demands something of packets is not taken for one that all packets meet: a finding would be wrong.
// A condition that
// comes first does not change how a rule for a port is read.
func FuzzReadRule(f *testing.F) {
	info := make([]byte, 200)
	info[0], info[1], info[2] = 1, 2, 80
	known := bytes.Clone(info)
	binary.NativeEndian.PutUint16(known[conntrackFlags:], conntrackStateFlag)
	binary.NativeEndian.PutUint16(known[conntrackStates:], knownStates)
	for _, seed := range [][]byte{toPort(443), match("multiport", 1, info[:48]), match("multiport", 1, info[:47]),
		match("tcp", 0, info[:12]), match("udp", 0, info[:9]), match("udp", 0, nil), match("conntrack", 3, known),
		match("conntrack", 2, known[:conntrackStates+1]), match("comment", 0, nil),
		expr.Encode(expr.Join(expr.In("ports"), expr.Jump("other"))), expr.Encode(expr.List{&expr.Counter{}}), nil} {
		f.Add(seed, uint16(22))
	}
	f.Fuzz(func(t *testing.T, expressions []byte, port uint16) {
		r := readRule(expressions)
		names := 0
		for _, name := range r.Interfaces {
			names += len(strings.TrimSuffix(name, "*"))
		}
		if len(r.Ports) > 15 || names+len(r.To)+len(r.portSet) > len(expressions) {
			t.Errorf("read %+v from %x", r, expressions)
		}
		demands := r.Established || r.ICMP || r.NotTCP || r.NotUDP || len(r.Interfaces)+len(r.Ports) > 0 || r.portSet != ""
		if demands && !r.Conditional {
			t.Errorf("%+v is for all packets: %x", r, expressions)
		}
		if !isWhole(expressions) || len(r.Ports) > 0 || r.To != "" || r.Verdict != plan.VerdictContinue {
			return
		}
		both := readRule(append(bytes.Clone(expressions), toPort(port)...))
		if len(both.Ports) != 1 || both.Ports[0] != port || !both.Conditional || both.Verdict != plan.VerdictAccept {
			t.Errorf("a rule for port %d is read as %+v behind %x", port, both, expressions)
		}
	})
}

// isWhole reports whether attributes fill b.
func isWhole(b []byte) bool {
	n := 0
	for _, part := range nfnetlink.All(b) {
		n += (unix.SizeofNlAttr + len(part) + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
	}
	return n == len(b)
}

// FuzzElements checks that elements that were written are read back, and that anything may be read.
func FuzzElements(f *testing.F) {
	var counter nfnetlink.Attributes
	counter.Number64(unix.NFTA_COUNTER_PACKETS, 3)
	counter.Number64(unix.NFTA_COUNTER_BYTES, 300)
	var message nfnetlink.Attributes
	message.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
		message.Nested(unix.NFTA_LIST_ELEM, func() {
			value(&message, unix.NFTA_SET_ELEM_KEY, []byte{0, 80})
			message.Nested(unix.NFTA_SET_ELEM_EXPR, func() { message.Bytes(unix.NFTA_EXPR_DATA, counter) })
		})
	})
	f.Add([]byte(message), []byte{192, 0, 2, 1}, []byte{}, uint64(1), uint64(60))
	f.Add([]byte(message[:len(message)-1]), []byte("k"), []byte("v"), uint64(0), uint64(1)<<63)
	f.Add([]byte(counter), []byte{}, []byte{}, uint64(0), uint64(0))
	f.Fuzz(func(t *testing.T, data, key, mapped []byte, packets, octets uint64) {
		sum := 0
		for e := range elements(data) {
			sum += len(e.Key) + len(e.Value)
		}
		if sum > len(data) {
			t.Errorf("%d bytes of elements were read from %d", sum, len(data))
		}
		readCount(data)
		if len(key)+len(mapped) > 30_000 {
			return
		}
		var a nfnetlink.Attributes
		a.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			for range 2 {
				a.Nested(unix.NFTA_LIST_ELEM, func() {
					value(&a, unix.NFTA_SET_ELEM_KEY, key)
					value(&a, unix.NFTA_SET_ELEM_DATA, mapped)
					a.Nested(unix.NFTA_SET_ELEM_EXPR, func() {
						a.Nested(unix.NFTA_EXPR_DATA, func() {
							a.Number64(unix.NFTA_COUNTER_PACKETS, packets)
							a.Number64(unix.NFTA_COUNTER_BYTES, octets)
						})
					})
				})
			}
		})
		want, got := Element{Key: key, Value: mapped, Count: Count{packets, octets}}, 0
		for e := range elements(a) {
			got++
			if diff := gocmp.Diff(want, e); diff != "" {
				t.Errorf("came back otherwise (-written +read):\n%s", diff)
			}
		}
		if got != 2 {
			t.Errorf("%d of 2 elements came back", got)
		}
	})
}

// FuzzComment checks that a rule's comment is read back from its user data, also behind data of other programs, and
// that anything may be read.
func FuzzComment(f *testing.F) {
	f.Add([]byte{0, 2, 'x', 0}, "web", []byte("nft"))
	f.Add([]byte{0, 255, 'x'}, "", []byte{})
	f.Add([]byte{1}, "a\x00b", []byte{0})
	f.Fuzz(func(t *testing.T, data []byte, text string, others []byte) {
		if got := comment(data); len(got) > max(len(data)-2, 0) {
			t.Errorf("%q was read from %x", got, data)
		}
		if len(text) > 254 || strings.HasSuffix(text, "\x00") || len(others) > 255 {
			return
		}
		written := Rule{Comment: text, Exprs: expr.Drop()}.UserData()
		for _, all := range [][]byte{[]byte(written), append(TLV(1, others), written...)} {
			if got := comment(all); got != text {
				t.Errorf("comment %q came back as %q from %x", text, got, all)
			}
		}
	})
}
