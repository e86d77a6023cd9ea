package main

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// A prober asks again if nobody answers at once, as on a busy machine, and returns who answers at last.
func TestProberAsksAgain(t *testing.T) {
	ns := nstest.New(t)
	var listener net.Listener
	ns.Do(t, func() (err error) {
		listener, err = net.Listen("tcp4", "127.0.0.1:0")
		return err
	})
	defer listener.Close()
	go func() {
		for i := 0; ; i++ {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if i >= 3 {
				fmt.Fprintln(conn, `{"pod": "pod-b"}`)
			}
			conn.Close()
		}
	}()
	p, err := newProber(ns.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	address := netip.MustParseAddrPort(listener.Addr().String())
	if answer, err := p.wait(t.Context(), address, "", time.Now().Add(limit)); err != nil || answer != podB {
		t.Errorf("%q answers: %v", answer, err)
	}
}
