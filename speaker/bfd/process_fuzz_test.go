package bfd

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// FuzzOrders has the process that keeps the sessions read orders. What makes no sense in them is
// refused, or no session.
func FuzzOrders(f *testing.F) {
	var b bytes.Buffer
	_ = json.NewEncoder(&b).Encode(order{Normal: true, Sessions: []ordered{
		{toRight, fast}, {Key{Peer: netip.MustParseAddr("fe80::1%eth0"), Multihop: true}, Profile{}}}})
	f.Add(bytes.Clone(b.Bytes()))
	f.Add([]byte(`{"Sessions":[{"Key":{},"Profile":{"Transmit":-1,"Multiplier":300}}]}{"Sessions":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		discriminator := uint32(100)
		e := newEngine(newWorker(workerOptions{Options: Options{Log: slog.New(slog.DiscardHandler)},
			random: func() uint32 { discriminator++; return discriminator }}), &still{})
		now := epoch
		for orders := json.NewDecoder(bytes.NewReader(data)); ; now = now.Add(time.Second) {
			var o order
			if orders.Decode(&o) != nil {
				break
			}
			e.apply(o.desired(), now)
			e.step(now)
			for _, s := range e.sessions {
				if !s.leaving && !s.key.Peer.IsValid() {
					t.Errorf("%s: a session with nobody", data)
				}
			}
		}
		if _, err := json.Marshal(all(e.worker)); err != nil {
			t.Errorf("%s: %v", data, err)
		}
	})
}

// FuzzAnswers has the speaker read what that process tells.
func FuzzAnswers(f *testing.F) {
	for _, said := range []answer{
		{Change: &change{Key: toRight, From: Down, To: Up}},
		{Change: &change{Problem: "no such device"}},
		{Health: &Health{RealTime: true, Dropped: map[Drop]uint64{dropTTL: 3}},
			Outcomes: []answered{{toRight, Outcome{State: Up, Failures: 1, LastDown: &Loss{At: epoch},
				Refused: lb.Refuse(lb.ReasonNoNextHop, "none")}}}},
	} {
		text, err := json.Marshal(said)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		a := New(Options{Log: slog.New(slog.DiscardHandler), Changed: func() {}})
		_ = a.listen(bytes.NewReader(data))
		for key, o := range a.Outcomes() {
			_, _, _ = key.String(), o.State.String(), o.RemoteDiagnostic.String()
		}
		if _, err := json.Marshal(a.Health()); err != nil {
			t.Errorf("%s: %v", data, err)
		}
		a.stranded(nil)
	})
}
